"""Perplexity and KL divergence over the windows of a text, as llama-perplexity defines them.

The text is cut into windows that do not overlap. The second half of each counts, so that every counted token
has at least half a window before it. Where texts of a model begin with BOS, each window's first token is it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localchat.engine.events import Accepted, PromptLogprobs
from localchat.engine.interface import Engine
from localchat.engine.remote.client import RemoteClient
from localchat.engine.request import GenerateRequest, Sampling, TextPrompt, TokenIds
from localchat.errors import LocalchatError, UsageError
from localchat.measure.quality_record import DivergenceFigures, PerplexityFigures

_TOP: Final = 20
_GREEDY: Final = Sampling(temperature=0.0)
_ANSWER_S: Final = 600.0
_LEAST_REST: Final = 1e-9
_ROWS_AT_ONCE: Final = 64


class ScoredWindow(NamedTuple):
    """The counted tokens of one window."""

    logprobs: tuple[float, ...]
    tops: tuple[Mapping[str, float], ...]
    """The likeliest tokens of each position by text; empty where the server sends none."""
    text_bytes: int
    rows: Path | None = None
    """Log probabilities of all tokens, float16, a row for each position; None: not available."""


class Scorer(Protocol):
    """Gives the log probabilities of known tokens."""

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text; the first stands for BOS where the model has one."""
        ...

    def score(self, window: Sequence[int], first: int, rows: Path) -> ScoredWindow:
        """Score the tokens after number `first`. `rows`: where the whole rows may be written."""
        ...


class EngineScorer:
    """Scores with an engine of this machine."""

    def __init__(self, engine: Engine, *, bos: bool) -> None:
        """bos: begin each window with BOS, where texts of this model do."""
        self._engine = engine
        self._bos = bos

    def tokens(self, text: str) -> list[int]:
        found = self._engine.tokenize(text)
        plain = len(self._engine.tokenize("a"))
        request = GenerateRequest(TextPrompt("a"), _GREEDY, max_tokens=1)
        begun = next(e for e in self._engine.generate(request) if isinstance(e, Accepted))
        if self._bos and begun.prompt_tokens > plain:
            return [found[0], *found]
        return found

    def score(self, window: Sequence[int], first: int, rows: Path) -> ScoredWindow:
        request = GenerateRequest(
            TokenIds(tuple(window), first_bos=self._bos),
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
                "the backend gives no log probabilities of a prompt",
                hint="--only greedy,json,tools,needles,questions leaves them out",
            )
        size = rows.stat().st_size if rows.is_file() else 0
        whole = size > 0 and size % (2 * len(entries)) == 0
        return ScoredWindow(
            tuple(entry.logprob for entry in entries),
            tuple({_shown(text): value for _, text, value in entry.top} for entry in entries),
            sum(len(entry.text) for entry in entries),
            rows if whole else None,
        )


class RemoteScorer:
    """Scores with a server that echoes prompts with their log probabilities: localchat, vLLM."""

    def __init__(self, engine: Engine, client: RemoteClient, model: str) -> None:
        self._engine = engine
        self._client = client
        self._model = model

    def tokens(self, text: str) -> list[int]:
        return self._engine.tokenize(text)

    def score(self, window: Sequence[int], first: int, rows: Path) -> ScoredWindow:
        problem: LocalchatError | None = None
        for most, top in ((0, _TOP), (1, _TOP), (1, 5)):
            try:
                return self._scored(window, first, most, top)
            except UsageError as refused:
                problem = problem or refused
        assert problem is not None
        raise problem

    def _scored(self, window: Sequence[int], first: int, most: int, top: int) -> ScoredWindow:
        body = {
            "model": self._model,
            "prompt": list(window),
            "echo": True,
            "max_tokens": most,
            "logprobs": top,
            "temperature": 0,
        }
        found = self._client.request_json("completions", body, timeout_s=_ANSWER_S)
        try:
            told: dict[str, Any] = found["choices"][0]["logprobs"]
            counted = slice(first + 1, len(window))
            values = [float(one) for one in told["token_logprobs"][counted]]
            texts = [str(one) for one in told["tokens"][counted]]
            tops = [dict(one or {}) for one in told["top_logprobs"][counted]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UsageError("the server sends no log probabilities of a prompt") from error
        if len(values) != len(window) - 1 - first:
            raise UsageError("the server sends no log probabilities of a prompt")
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        return ScoredWindow(tuple(values), tuple(tops), size)


def windows(tokens: Sequence[int], window_tokens: int, most: int) -> Iterator[Sequence[int]]:
    """The whole windows of a text, `most` at most (0: all). Raises UsageError for a text shorter than one."""
    if len(tokens) < window_tokens:
        raise UsageError(
            f"the text has {len(tokens):,} tokens, and a window {window_tokens:,}",
            hint="give a longer --text, or a smaller --window",
        )
    starts = range(0, len(tokens) + 1, window_tokens)
    for number, (start, end) in enumerate(pairwise(starts)):
        if most and number == most:
            return
        yield tokens[start:end]


def perplexity(scored: Sequence[ScoredWindow]) -> PerplexityFigures:
    """Perplexity of scored windows, and its standard error."""
    losses = [-value for window in scored for value in window.logprobs]
    mean = math.fsum(losses) / len(losses)
    spread = math.fsum(loss * loss for loss in losses) / len(losses) - mean * mean
    found = math.exp(min(mean, 700.0))
    error = math.sqrt(max(spread, 0.0) / max(len(losses) - 1, 1))
    size = sum(window.text_bytes for window in scored)
    bits = math.fsum(losses) / math.log(2) / size if size else 0.0
    return PerplexityFigures(found, found * error, len(losses), bits)


class _PositionDivergence(NamedTuple):
    """The divergence of each position, and whether the likeliest token is the same."""

    kl: list[float]
    same: list[bool]


class Divergence:
    """Gathers the divergence of windows from the first model's."""

    def __init__(self) -> None:
        self._kl: list[float] = []
        self._same: list[bool] = []
        self._complete = True

    def add(self, base: ScoredWindow, other: ScoredWindow) -> None:
        """Add a window. Raises UsageError where nothing can be compared."""
        if base.rows is not None and other.rows is not None:
            found = _divergence_of_rows(base.rows, other.rows, len(base.logprobs))
        else:
            self._complete = False
            found = _divergence_of_tops(base.tops, other.tops)
        self._kl += found.kl
        self._same += found.same

    def figures(self) -> DivergenceFigures:
        """Figures of everything added so far."""
        kl = np.asarray(self._kl)
        return DivergenceFigures(
            float(kl.mean()),
            float(np.percentile(kl, 99)),
            float(kl.max()),
            sum(self._same) / len(self._same),
            self._complete,
        )


def _divergence_of_rows(base: Path, other: Path, count: int) -> _PositionDivergence:
    one, two = (np.fromfile(path, "<f2").reshape(count, -1) for path in (base, other))
    if one.shape != two.shape:
        raise UsageError("the models have different vocabularies")
    found = _PositionDivergence([], [])
    for start in range(0, count, _ROWS_AT_ONCE):
        p, q = (_normal(rows[start : start + _ROWS_AT_ONCE]) for rows in (one, two))
        found.kl.extend(np.maximum((np.exp(p) * (p - q)).sum(1), 0.0).tolist())
        found.same.extend((p.argmax(1) == q.argmax(1)).tolist())
    return found


def _normal(rows: NDArray[np.float16]) -> NDArray[np.float32]:
    wide = rows.astype(np.float32)
    total: NDArray[np.float32] = np.log(np.exp(wide).sum(1, keepdims=True))
    return wide - total


def _divergence_of_tops(
    base: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]
) -> _PositionDivergence:
    """A lower bound: the tokens that both name, and all others as one."""
    if not all(base) or not all(other) or not base:
        raise UsageError("the server names no likeliest tokens of a prompt")
    found = _PositionDivergence([], [])
    for one, two in zip(base, other, strict=True):
        shared = one.keys() & two.keys()
        kl = sum(math.exp(one[text]) * (one[text] - two[text]) for text in shared)
        p, q = (max(1 - sum(math.exp(top[t]) for t in shared), _LEAST_REST) for top in (one, two))
        found.kl.append(max(kl + p * math.log(p / q), 0.0))
        found.same.append(max(one, key=one.__getitem__) == max(two, key=two.__getitem__))
    return found


def _shown(text: bytes) -> str:
    return text.decode("utf-8", "replace")
