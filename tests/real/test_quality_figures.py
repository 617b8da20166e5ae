"""Perplexity and divergence of `quality` on a real model, beside transformers in fp32."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from localchat.measure.perplexity import (
    Divergence,
    ScoredWindow,
    Scorer,
    perplexity,
    windows,
)
from localchat.measure.records import DivergenceFigures
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
    divergence: DivergenceFigures


def write(source: Path, target: Path, quantization: str) -> Path:
    GgufQuantizer().write(source, target, quantization, 2, lambda done, total: None)
    return target


def measure(
    open_engine: OpenEngine, models: list[Path], parts: Parts, folder: Path, kv_type: str
) -> Figures:
    folder.mkdir()
    scored: list[list[ScoredWindow]] = []
    for path in models:
        engine = open_engine(path, backend="llamacpp", context_tokens=512, kv_type=kv_type)
        rows = (folder / f"{path.stem}-{number}" for number in range(WINDOWS))
        scorer = Scorer(engine)
        scored.append(
            [scorer.score(part, FIRST, file) for part, file in zip(parts, rows, strict=True)]
        )
    divergence = Divergence()
    for base, other in zip(*scored, strict=True):
        divergence.add(base, other)
    return Figures([perplexity(each).perplexity for each in scored], divergence.figures())


def expected_rows(models: list[Path], parts: Parts) -> list[NDArray[np.float32]]:
    """Return transformers' log probabilities of the scored positions."""
    rows: list[NDArray[np.float32]] = []
    for path in models:
        reference = TransformersReference(path) if rows else load_reference(SMOLLM2)
        rows.append(np.stack([reference.logprobs(list(part))[FIRST:-1] for part in parts]))
    return rows


def test_figures_are_those_of_transformers(
    smollm2: Path, open_engine: OpenEngine, tmp_path: Path
) -> None:
    models = [smollm2, write(smollm2, tmp_path / "q4_0.gguf", "Q4_0")]
    # The same weights, with which llama.cpp computes in fp32.
    unpacked = [write(path, tmp_path / f"{path.stem}-f32.gguf", "F32") for path in models]
    scorer = Scorer(open_engine(smollm2, backend="llamacpp", context_tokens=512))
    parts = list(windows(scorer.tokens(sample_text()), WINDOW_TOKENS, WINDOWS))
    exact = measure(open_engine, unpacked, parts, tmp_path / "exact", "f32")
    usual = measure(open_engine, models, parts, tmp_path / "usual", "f16")
    base_rows, other_rows = expected_rows(models, parts)
    texts = np.stack([part[FIRST + 1 :] for part in parts])
    perplexities = [
        float(np.exp(-np.take_along_axis(rows, texts[:, :, None], axis=2).mean()))
        for rows in (base_rows, other_rows)
    ]
    kl = float((np.exp(base_rows) * (base_rows - other_rows)).sum(axis=2).mean())
    same_top = float((base_rows.argmax(axis=2) == other_rows.argmax(axis=2)).mean())
    assert exact.perplexities == pytest.approx(perplexities, rel=0.001)
    assert exact.divergence.kl_mean == pytest.approx(kl, rel=0.001)
    assert exact.divergence.same_top_share == pytest.approx(same_top, abs=0.003)
    assert usual.perplexities == pytest.approx(perplexities, rel=0.01)
    # With quantized weights llama.cpp rounds activations to 8 bits, on each kind of CPU in another order.
    assert usual.divergence.kl_mean == pytest.approx(kl, rel=0.05)
    assert usual.divergence.same_top_share == pytest.approx(same_top, abs=0.03)
