"""Perplexity and divergence of `quality` on a real model, beside transformers in fp32."""

from pathlib import Path

import numpy as np
import pytest

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


def test_figures_are_those_of_transformers(
    smollm2: Path, open_engine: OpenEngine, tmp_path: Path
) -> None:
    coarse = tmp_path / "q4_0.gguf"
    GgufQuantizer().write(smollm2, coarse, "Q4_0", 2, lambda done, total: None)
    ours: list[list[ScoredWindow]] = []
    theirs = []
    for path in (smollm2, coarse):
        engine = open_engine(path, backend="llamacpp", context_tokens=512)
        scorer = Scorer(engine)
        parts = list(windows(scorer.tokens(sample_text()), WINDOW_TOKENS, WINDOWS))
        rows = (tmp_path / f"{path.stem}-{number}" for number in range(WINDOWS))
        ours.append(
            [scorer.score(part, FIRST, file) for part, file in zip(parts, rows, strict=True)]
        )
        reference = load_reference(SMOLLM2) if path == smollm2 else TransformersReference(path)
        theirs.append(np.stack([reference.logprobs(list(part))[FIRST:-1] for part in parts]))
    texts = np.stack([part[FIRST + 1 :] for part in parts])
    for scored, expected in zip(ours, theirs, strict=True):
        losses = -np.take_along_axis(expected, texts[:, :, None], axis=2)
        assert perplexity(scored).perplexity == pytest.approx(np.exp(losses.mean()), rel=0.01)
    divergence = Divergence()
    for base, other in zip(*ours, strict=True):
        divergence.add(base, other)
    figures = divergence.figures()
    base_rows, other_rows = theirs
    expected_kl = (np.exp(base_rows) * (base_rows - other_rows)).sum(axis=2).mean()
    same_top = (base_rows.argmax(axis=2) == other_rows.argmax(axis=2)).mean()
    # llama.cpp rounds activations to 8 bits, on each kind of CPU in another order.
    assert figures.kl_mean == pytest.approx(expected_kl, rel=0.05)
    assert figures.same_top_share == pytest.approx(same_top, abs=0.03)
