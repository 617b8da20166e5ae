"""Perplexity and KL divergence over the windows of a text, as llama-perplexity defines them.

The text is cut into windows that do not overlap. The second half of each is scored, so that every scored token
has at least half a window before it. If the model's texts start with BOS, so does every window.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localchat.engine.events import Accepted, PromptLogprobs
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest, Sampling, TextPrompt, TokenIds
from localchat.errors import UsageError
from localchat.measure.records import DivergenceFigures, PerplexityFigures

_TOP: Final = 20
_GREEDY: Final = Sampling(temperature=0.0)
_MIN_REST: Final = 1e-9
"""Lower bound on the probability of all tokens outside the top list."""
_ROWS_AT_ONCE: Final = 64


class ScoredWindow(NamedTuple):
    """Scored tokens of one window."""

    logprobs: tuple[float, ...]
    tops: tuple[Mapping[str, float], ...]
    """Top tokens of each position by text; empty if the engine reports none."""
    text_bytes: int
    rows: Path | None = None
    """File with the log probabilities of all tokens: float16, one row per position."""


class Scorer:
    """Computes the log probabilities of the tokens of a text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def tokens(self, text: str) -> list[int]:
        """Tokenize a text. The first token stands for BOS, if the model's texts start with it."""
        tokens = self._engine.tokenize(text)
        # A prompt that is longer than its tokens starts with BOS.
        plain_tokens = len(self._engine.tokenize("a"))
        request = GenerateRequest(TextPrompt("a"), _GREEDY, max_tokens=1)
        events = self._engine.generate(request)
        accepted = next(event for event in events if isinstance(event, Accepted))
        if accepted.prompt_tokens > plain_tokens:
            return [tokens[0], *tokens]
        return tokens

    def score(self, window: Sequence[int], first: int, rows: Path) -> ScoredWindow:
        """Score the tokens after index `first`. The engine may write full rows to the file `rows`."""
        request = GenerateRequest(
            TokenIds(tuple(window), first_bos=True),
            _GREEDY,
            max_tokens=1,
            prompt_logprobs=_TOP,
            prompt_logprobs_from=first,
            prompt_logprobs_file=str(rows),
            speculation=False,
        )
        entries = [
            entry
            for event in self._engine.generate(request)
            if isinstance(event, PromptLogprobs)
            for entry in event.tokens
        ]
        if len(entries) != len(window) - 1 - first:
            raise UsageError(
                "the backend does not report log probabilities of a prompt",
                hint="--only json,tools,needles,questions leaves them out",
            )
        size = rows.stat().st_size if rows.is_file() else 0
        has_rows = size > 0 and size % (2 * len(entries)) == 0
        return ScoredWindow(
            tuple(entry.logprob for entry in entries),
            tuple(
                {text.decode("utf-8", "replace"): value for _, text, value in entry.top}
                for entry in entries
            ),
            sum(len(entry.text) for entry in entries),
            rows if has_rows else None,
        )


def windows(tokens: Sequence[int], window_tokens: int, limit: int) -> Iterator[Sequence[int]]:
    """Yield the complete windows of a text, up to `limit` (0 for all).

    Raises UsageError if the text is shorter than a window.
    """
    if len(tokens) < window_tokens:
        raise UsageError(
            f"the text has {len(tokens):,} tokens, fewer than a window of {window_tokens:,}",
            hint="give a longer --text, or a smaller --window",
        )
    starts = range(0, len(tokens) + 1, window_tokens)
    for number, (start, end) in enumerate(pairwise(starts)):
        if limit and number == limit:
            return
        yield tokens[start:end]


def perplexity(scored: Sequence[ScoredWindow]) -> PerplexityFigures:
    """Compute the perplexity of scored windows, and its standard error."""
    losses = [-value for window in scored for value in window.logprobs]
    mean = math.fsum(losses) / len(losses)
    variance = math.fsum(loss * loss for loss in losses) / len(losses) - mean * mean
    value = math.exp(min(mean, 700.0))
    error = math.sqrt(max(variance, 0.0) / max(len(losses) - 1, 1))
    size = sum(window.text_bytes for window in scored)
    bits = math.fsum(losses) / math.log(2) / size if size else 0.0
    return PerplexityFigures(value, value * error, len(losses), bits)


class _PositionDivergence(NamedTuple):
    """Divergence of each position, and whether both models rank the same token first."""

    kl: list[float]
    same_top: list[bool]


class Divergence:
    """Collects the divergence of windows from those of the first model."""

    def __init__(self) -> None:
        self._kl: list[float] = []
        self._same_top: list[bool] = []
        self._delta_p: list[float] = []
        self._complete = True

    def add(self, base: ScoredWindow, other: ScoredWindow) -> None:
        """Add a window. Raises UsageError if the models cannot be compared."""
        if base.rows is not None and other.rows is not None:
            positions = _divergence_of_rows(base.rows, other.rows, len(base.logprobs))
        else:
            self._complete = False
            positions = _divergence_of_tops(base.tops, other.tops)
        self._kl += positions.kl
        self._same_top += positions.same_top
        logprobs = zip(base.logprobs, other.logprobs, strict=True)
        self._delta_p += [math.exp(second) - math.exp(first) for first, second in logprobs]

    def figures(self) -> DivergenceFigures:
        """Return the figures of all windows so far."""
        kl = np.asarray(self._kl)
        return DivergenceFigures(
            float(kl.mean()),
            float(np.percentile(kl, 99)),
            float(kl.max()),
            sum(self._same_top) / len(self._same_top),
            self._complete,
            math.sqrt(math.fsum(delta * delta for delta in self._delta_p) / len(self._delta_p)),
        )


def _divergence_of_rows(base: Path, other: Path, count: int) -> _PositionDivergence:
    base_rows, other_rows = (np.fromfile(path, "<f2").reshape(count, -1) for path in (base, other))
    if base_rows.shape != other_rows.shape:
        raise UsageError("the models have different vocabularies")
    positions = _PositionDivergence([], [])
    for start in range(0, count, _ROWS_AT_ONCE):
        chunk = slice(start, start + _ROWS_AT_ONCE)
        p = _normalize(base_rows[chunk])
        q = _normalize(other_rows[chunk])
        positions.kl.extend(np.maximum((np.exp(p) * (p - q)).sum(1), 0.0).tolist())
        positions.same_top.extend((p.argmax(1) == q.argmax(1)).tolist())
    return positions


def _normalize(rows: NDArray[np.float16]) -> NDArray[np.float32]:
    """Scale log probabilities, which float16 rounds, so that each row sums to 1."""
    wide = rows.astype(np.float32)
    total: NDArray[np.float32] = np.log(np.exp(wide).sum(1, keepdims=True))
    return wide - total


def _divergence_of_tops(
    base: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]
) -> _PositionDivergence:
    """Return a lower bound, which counts all tokens outside of both top lists as one."""
    if not all(base) or not all(other) or not base:
        raise UsageError("the backend does not report the top tokens of a prompt")
    positions = _PositionDivergence([], [])
    for base_top, other_top in zip(base, other, strict=True):
        shared = base_top.keys() & other_top.keys()
        kl = sum(math.exp(base_top[text]) * (base_top[text] - other_top[text]) for text in shared)
        p, q = (
            max(1 - sum(math.exp(top[text]) for text in shared), _MIN_REST)
            for top in (base_top, other_top)
        )
        positions.kl.append(max(kl + p * math.log(p / q), 0.0))
        positions.same_top.append(
            max(base_top, key=base_top.__getitem__) == max(other_top, key=other_top.__getitem__)
        )
    return positions
