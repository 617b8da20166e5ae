"""Memory of a model divided among ranks: what each one takes is what its plan counted."""

from pathlib import Path

import pytest
import torch

from localchat_cuda.config.model import rounded_config
from localchat_cuda.config.reader import read_config
from localchat_cuda.plan.weight_sizes import weight_share, weights_bytes
from localchat_cuda.ranks.split import split_config
from localchat_cuda.weights.source import read_headers
from tests.support.rank_cases import FAMILIES, FORMATS, save_case
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_models import Tiny

SIZED = ("llama", "qwen3-moe", "deepseek-v2", "granite4-h", "awq", "fp8 channel", "rounded int4")


@pytest.mark.parametrize("name", SIZED)
def test_a_rank_takes_what_is_planned(name: str, tmp_path: Path) -> None:
    rounded = save_case({**FAMILIES, **FORMATS}[name], tmp_path)
    config = rounded_config(read_config(tmp_path), rounded, name)
    share = weight_share(config, split_config(config, 2, name))
    planned = weights_bytes(config, read_headers(tmp_path).values()) * share
    dtype = getattr(torch, config.dtype)
    taken = on_ranks(
        2, lambda each: Tiny(tmp_path, dtype, rounded=rounded, collective=each).weights.bytes
    )
    for bytes_ in taken:
        assert bytes_ == pytest.approx(planned, rel=0.05)
