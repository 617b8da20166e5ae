"""Which prompt steps compute the same bits as narrower ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localchat_cuda.exact_widths import exact_widths
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.runner.runner import CudaRunner
from tests.support import tiny_models
from tests.support.tiny_engine_core import tiny_runner


def runner(folder: Path, monkeypatch: pytest.MonkeyPatch, *, other_bits_at: int = 0) -> CudaRunner:
    """A runner without attention. Gemms compute each row by itself, except those of `other_bits_at` rows."""
    tiny_models.save(tiny_models.reference("qwen2", num_hidden_layers=2), folder)
    plain = DenseLayers.gemm

    def by_row(self: DenseLayers, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = torch.cat([plain(self, row[None], weight) for row in x], 1)
        return result * (1 + 1e-6) if len(x) == other_bits_at else result

    def queries(self: DenseLayers, layer: int, sinks: object) -> torch.Tensor:
        return self.queries(layer).flatten(1)

    monkeypatch.setattr(DenseLayers, "gemm", by_row)
    monkeypatch.setattr(DenseLayers, "attention", queries)
    made = tiny_runner(folder, step=300, context=512)
    # Runners with steps of a quarter of a second have chunks of 64 tokens.
    made.capabilities = replace(made.capabilities, step_target_s=0.25)
    return made


@pytest.mark.parametrize(("other_bits_at", "wanted"), [(0, (128, 256)), (256, (128,)), (64, ())])
def test_widths_with_the_bits_of_one_chunk_each_are_found(
    other_bits_at: int, wanted: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runner(tmp_path, monkeypatch, other_bits_at=other_bits_at)
    assert exact_widths(made) == wanted


def test_context_of_one_chunk_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(tmp_path, monkeypatch)
    made.capabilities = replace(made.capabilities, context_tokens=128)
    assert exact_widths(made) == ()
