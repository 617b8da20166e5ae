"""Families in every format that layers are stored in: what is peculiar to one meets what is peculiar to the
other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import quantizers, tiny_models
from tests.support.fp8_checkpoints import save_fp8
from tests.support.quantizers import Way
from tests.support.tiny_engine_core import TinyLoop, request, tiny_runner
from tests.support.tiny_models import Tiny, reference_logits, relative_error, tokens_of

KINDS = ("mistral", "gemma2", "gemma3", "phi3")
PACKED = ("awq", "gptq", "gptq in order", "compressed")
WIDE = {"hidden_size": 256, "intermediate_size": 384}
"""More than one group everywhere."""


def made(kind: str, stored: str, folder: Path) -> Any:
    """The model, its weights being what the checkpoint's codes stand for."""
    model = tiny_models.reference(kind, **WIDE)
    match stored:
        case "awq":
            tiny_models.save_awq(model, folder)
        case "gptq":
            quantizers.save(model, folder, Way(symmetric=True))
        case "gptq in order":
            quantizers.save(model, folder, Way(ordered=True), 2)
        case "compressed":
            quantizers.save(model, folder, Way(symmetric=True), 0)
        case layout:
            save_fp8(model, folder, layout)
    return model


@pytest.mark.parametrize("stored", [*PACKED, "channel", "deepseek"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_beyond_the_window_is_transformers(kind: str, stored: str, tmp_path: Path) -> None:
    model, tokens = made(kind, stored, tmp_path), tokens_of(31, 40)
    ours, wanted = Tiny(tmp_path, torch.float32), reference_logits(model, tokens)
    assert relative_error(ours.prompt(tokens, 17), wanted) < 1e-4
    if stored in PACKED:
        # activations are rounded to fp16
        assert relative_error(ours.prompt(tokens, 17, packed=True), wanted) < 1e-2


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_keys_of_8_bits_serve_windows_and_caps(kind: str, tmp_path: Path) -> None:
    model, tokens = made(kind, "gptq in order", tmp_path), tokens_of(32, 90)
    runner = tiny_runner(tmp_path, step=32, fp8_kv=True)
    told = TinyLoop(runner).say(request(tokens, prompt_logprobs=0, max_tokens=8))
    logs = reference_logits(model, tokens).log_softmax(-1)[:-1]
    wanted = logs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    found = torch.tensor([entry.logprob for entry in told.prompt_logprobs])
    assert relative_error(found, wanted) < 0.1
    assert len(told.tokens()) == 8
