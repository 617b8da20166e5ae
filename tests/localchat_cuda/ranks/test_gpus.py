"""Engines over two GPUs: TRITON_INTERPRET=0 pytest tests/localchat_cuda/ranks on a machine that has them."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.fit.load_options import LoadOptions
from tests.support.answers import Answer, ask, told_apart
from tests.support.speaking_checkpoint import write_speaking
from tests.support.tiny_engine_core import request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
NEAR = 0.1


def answers(folder: Path, gpus: int) -> list[Answer]:
    options = EngineOptions(
        folder, LoadOptions(context_tokens=1024, max_slots=4, gpus=gpus), backend="cuda"
    )
    with closing(LocalEngine(options, notify=lambda text: None)) as engine:
        found = [ask(engine, request((65, 66, 67) * count, max_tokens=60)) for count in (3, 200)]
        info = engine.info()
    assert info.actual is not None and info.predicted is not None
    assert info.actual.weights_bytes == pytest.approx(info.predicted.weights_bytes, rel=0.05)
    return found


def test_two_gpus_write_the_texts_of_one(tmp_path: Path) -> None:
    folder = write_speaking(tmp_path)
    for one, two in zip(answers(folder, 1), answers(folder, 2), strict=True):
        assert told_apart(one, two) < NEAR
