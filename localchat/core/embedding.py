"""Embedding in the engine process: tokenizes texts at once, and computes one request after the other.

It needs no engine core, because a text is one step without sampling, cache or drafts.
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from localchat.backend_api.interface import Embedder, EmbeddingModel
from localchat.core.stats import EngineCounters
from localchat.engine.events import EngineStats, MetricsSnapshot
from localchat.errors import ContextExceeded, LocalchatError, UsageError

MAX_TEXTS = 4096
ONLY_EMBEDS = "It computes embeddings and cannot generate text."


Phase: TypeAlias = Literal["queued", "loading", "prefill"]
VectorsCallback = Callable[[int, list[list[float]], tuple[int, ...]], None]
"""Called with the request, its vectors, and the number of tokens of each text."""


@dataclass(frozen=True, slots=True)
class _EmbedRequest:
    id: int
    tokens: list[list[int]]


class EmbeddingQueue:
    """Queue of embedding requests. `submit` belongs to input threads, `run` to the main thread."""

    def __init__(
        self,
        model: EmbeddingModel,
        name: str,
        context_tokens: int,
        counters: EngineCounters,
        on_vectors: VectorsCallback,
        fail: Callable[[int, LocalchatError], None],
    ) -> None:
        """`context_tokens`: longest text. `on_vectors` and `fail` get the result of a request."""
        self._model = model
        self._name = name
        self._context = context_tokens
        self._counters = counters
        self._on_vectors = on_vectors
        self._fail = fail
        self._waiting: queue.SimpleQueue[_EmbedRequest | None] = queue.SimpleQueue()
        self._embedder: Embedder | None = None
        self._running = False

    def submit(self, id_: int, texts: Sequence[str], *, truncate: bool = False) -> None:
        """Tokenize a request and queue it, even before the model is loaded.

        `truncate`: see Engine.embed. Raises UsageError, ContextExceeded.
        """
        try:
            tokens = self._tokenize(texts, truncate=truncate)
        except LocalchatError as error:
            self._counters.record_failure(error)
            raise
        self._waiting.put(_EmbedRequest(id_, tokens))

    def _tokenize(self, texts: Sequence[str], *, truncate: bool) -> list[list[int]]:
        if len(texts) > MAX_TEXTS:
            raise UsageError(f"a request may have {MAX_TEXTS} texts; this one has {len(texts)}")
        token_lists = []
        for number, text in enumerate(texts):
            which = "the text"
            if len(texts) > 1:
                which = f"text {number + 1} of {len(texts)}"
            tokens = self._model.text_tokens(text)
            if not tokens:
                raise UsageError(f"{which} is empty, so there is nothing to embed")
            if truncate:
                tokens = self._truncated(tokens)
            if len(tokens) > self._context:
                raise ContextExceeded(
                    f"{which} has {len(tokens):,} tokens, but {self._name} reads at most {self._context:,}",
                    hint="embed it in parts",
                    prompt_tokens=len(tokens),
                    context_tokens=self._context,
                    embeds=True,
                )
            token_lists.append(tokens)
        return token_lists

    def _truncated(self, tokens: list[int]) -> list[int]:
        """Truncate a text to the tokens that the model reads, with its end tokens."""
        if len(tokens) <= self._context:
            return tokens
        end: list[int] = []
        for token, last in zip(tokens[::-1], self._model.text_tokens("")[::-1], strict=False):
            if token != last:
                break
            end.insert(0, token)
        return [*tokens[: self._context - len(end)], *end]

    def run(self, embedder: Embedder) -> None:
        """Serve until `stop`."""
        self._embedder = embedder
        while (texts := self._waiting.get()) is not None:
            self._running = True
            try:
                vectors = embedder.embed(texts.tokens)
            except LocalchatError as error:
                self._counters.record_failure(error)
                self._fail(texts.id, error)
            else:
                lengths = tuple(map(len, texts.tokens))
                self._counters.record_embed(sum(lengths))
                self._on_vectors(texts.id, vectors, lengths)
            self._running = False

    def stop(self) -> None:
        """End `run` after its step."""
        self._waiting.put(None)
        if self._embedder is not None:
            self._embedder.abort()

    def stats(self) -> EngineStats:
        """Return the counters, and the number of requests."""
        phase: Phase = "queued"
        if self._running:
            phase = "prefill"
        elif self._embedder is None:
            phase = "loading"
        now = MetricsSnapshot(
            phase=phase,
            running=int(self._running),
            waiting=self._waiting.qsize(),
        )
        return self._counters.stats(now, [])
