"""Perplexity and divergence of `quality` on a real model, beside transformers in fp32.

With quantized weights, llama.cpp rounds the inputs of each product to 8 bits. So transformers rounds them in
the same way for the figures of quantized models.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from localchat.measure.perplexity import (
    Divergence,
    ScoredWindow,
    Scorer,
    perplexity,
    windows,
)
from localchat.measure.workload import sample_text
from localchat_llamacpp.quantize import GgufQuantizer
from tests.real.conftest import SMOLLM2, OpenEngine, load_reference
from tests.support.transformers_reference import TransformersReference

WINDOW_TOKENS = 256
WINDOWS = 3
FIRST = WINDOW_TOKENS // 2

Parts = list[Sequence[int]]


class Figures(NamedTuple):
    """What `quality` shows of two models."""

    perplexities: list[float]
    kl_mean: float
    same_top_share: float


def write(source: Path, target: Path, quantization: str) -> Path:
    GgufQuantizer().write(source, target, quantization, 2, lambda done, total: None)
    return target


def measure(open_engine: OpenEngine, models: list[Path], parts: Parts, folder: Path) -> Figures:
    folder.mkdir()
    scored: list[list[ScoredWindow]] = []
    for path in models:
        engine = open_engine(path, backend="llamacpp", context_tokens=512, kv_type="f32")
        rows = (folder / f"{path.stem}-{number}" for number in range(WINDOWS))
        scorer = Scorer(engine)
        scored.append(
            [scorer.score(part, FIRST, file) for part, file in zip(parts, rows, strict=True)]
        )
    divergence = Divergence()
    for base, other in zip(*scored, strict=True):
        divergence.add(base, other)
    figures = divergence.figures()
    perplexities = [perplexity(each).perplexity for each in scored]
    return Figures(perplexities, figures.kl_mean, figures.same_top_share)


def rounded(activations: torch.Tensor) -> torch.Tensor:
    """Round to the 8 bits of Q8_0: 32 numbers share a scale, which is stored in fp16."""
    blocks = activations.reshape(-1, 32)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    numbers = torch.where(scales > 0, blocks / scales, 0).round()
    return (numbers * scales.half().float()).reshape(activations.shape)


@contextmanager
def rounds_activations(model: torch.nn.Module) -> Iterator[None]:
    """Round the inputs of all linear layers meanwhile."""

    def hook(module: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[torch.Tensor]:
        return (rounded(arguments[0]),)

    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    handles = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def expected_figures(references: list[TransformersReference], parts: Parts) -> Figures:
    """Return the figures of transformers' log probabilities at the scored positions."""
    base, other = (
        np.stack([reference.logprobs(list(part))[FIRST:-1] for part in parts])
        for reference in references
    )
    texts = np.stack([part[FIRST + 1 :] for part in parts])[:, :, None]
    perplexities = [
        float(np.exp(-np.take_along_axis(rows, texts, axis=2).mean())) for rows in (base, other)
    ]
    kl = float((np.exp(base) * (base - other)).sum(axis=2).mean())
    same_top = float((base.argmax(axis=2) == other.argmax(axis=2)).mean())
    return Figures(perplexities, kl, same_top)


def test_figures_are_those_of_transformers(
    smollm2: Path, open_engine: OpenEngine, tmp_path: Path
) -> None:
    models = [smollm2, write(smollm2, tmp_path / "q4_0.gguf", "Q4_0")]
    # The same weights, with which llama.cpp computes in fp32.
    unpacked = [write(path, tmp_path / f"{path.stem}-f32.gguf", "F32") for path in models]
    scorer = Scorer(open_engine(smollm2, backend="llamacpp", context_tokens=512))
    parts = list(windows(scorer.tokens(sample_text()), WINDOW_TOKENS, WINDOWS))
    exact = measure(open_engine, unpacked, parts, tmp_path / "exact")
    usual = measure(open_engine, models, parts, tmp_path / "usual")
    references = [load_reference(SMOLLM2), TransformersReference(models[1])]
    expected = expected_figures(references, parts)
    assert exact.perplexities == pytest.approx(expected.perplexities, rel=0.001)
    assert exact.kl_mean == pytest.approx(expected.kl_mean, rel=0.001)
    assert exact.same_top_share == pytest.approx(expected.same_top_share, abs=0.003)
    with rounds_activations(references[0].model), rounds_activations(references[1].model):
        expected = expected_figures(references, parts)
    # A last bit of a sum turns the rounding of some activations, so no two computations agree to the end.
    # They were 0.1 to 0.4 % apart.
    assert usual.perplexities == pytest.approx(expected.perplexities, rel=0.01)
    assert usual.kl_mean == pytest.approx(expected.kl_mean, rel=0.02)
    assert usual.same_top_share == pytest.approx(expected.same_top_share, abs=0.02)
