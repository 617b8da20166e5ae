"""A residual with a channel beyond the range of fp16, in a model of int4 weights and fp16 activations: such
channels appear in large models, and the product that makes them does not fit fp16 either."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from localchat_cuda.kernels import int4
from localchat_cuda.layers import dense as layers
from tests.support import tiny_models
from tests.support.tiny_models import Stretch, Tiny, tokens_of

CHANNEL = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first feed-forward layer makes one channel 2e5 and more; the last norm takes it back, so
    that the logits show what the second layer made of it."""
    folder = tmp_path_factory.mktemp("large")
    tiny_models.save_awq(tiny_models.reference("qwen2"), folder)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.0.mlp.down_proj.scales"][:, CHANNEL] *= 25_000.0
    tensors["model.norm.weight"][CHANNEL] = 2e-3
    safetensors.torch.save_file(tensors, path)
    return folder


def step(tiny: Tiny, rows: int, *, packed: bool) -> torch.Tensor:
    """Logits of three tokens of a prompt."""
    return tiny.step(Stretch(0, 0, tokens_of(61, rows), 3), packed=packed)


@pytest.mark.parametrize(
    ("rows", "packed", "kernels"),
    [(9, True, False), (20, True, False), (9, True, True), (17, False, True)],
    ids=["9 rows, reference", "20 rows, reference", "9 rows", "dequantized"],
)
def test_a_channel_beyond_fp16_leaves_the_others_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int, packed: bool, kernels: bool
) -> None:
    if not packed:
        monkeypatch.setattr(int4, "_PACKED_ROWS", 16)  # as 1,100 rows
    found = step(Tiny(folder, torch.float16, kernels=kernels), rows, packed=packed)
    largest = 0.0
    finish = layers.DenseLayers.finish

    def look(self: layers.DenseLayers, *how: Any) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, float(self.residual.abs().max()))
        return finish(self, *how)

    monkeypatch.setattr(layers.DenseLayers, "finish", look)
    wanted = step(Tiny(folder, torch.float32), rows, packed=False)
    assert 2e5 < largest < 1e6
    assert float((found - wanted).norm() / wanted.norm()) < 0.03
