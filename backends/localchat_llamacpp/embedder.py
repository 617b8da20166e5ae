"""Runs an embedding model: whole texts in, one vector per text out.

A text is pooled within one step, so a step contains whole texts only, and its width is the longest text that
the model reads. Embedding uses no padding, no cache and no drafts.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import LoadRequest, MemoryReport, Progress
from localchat.errors import EngineClosed, LocalchatError
from localchat.model_files.architecture import POOLING_NUMBERS
from localchat_llamacpp.batch import Batch, float_array
from localchat_llamacpp.load import Target, report
from localchat_llamacpp.native import Buffer, library
from localchat_llamacpp.native_model import (
    FLASH_AUTO,
    FLASH_OFF,
    Placement,
    Weights,
    load_weights,
    new_context,
)
from localchat_llamacpp.plan.embedding_plan import MAX_TEXTS

_STEP_TOKENS = 512
"""Tokens up to which short texts share a step. Wider steps only add latency."""


class LlamaCppEmbedder:
    """Embedder over one native context. Single thread, except for `abort`."""

    def __init__(self, weights: Weights, context: int, memory: MemoryReport, tokens: int) -> None:
        """Take ownership of `weights` and `context`."""
        self._api: Any = library().api
        self._weights = weights
        self._context = context
        self._report = memory
        self.context_tokens = tokens
        self.dimension = int(self._api.llama_model_n_embd_out(weights.handle))
        self._memory = self._api.llama_get_memory(context)
        self._batch = Batch(tokens, MAX_TEXTS)
        self._stop = False

    def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return a vector of length 1 for each text.

        A text has 1 to `context_tokens` tokens. Raises EngineClosed after `abort`, LocalchatError for a result
        that is not a number.
        """
        embeddings: list[list[float]] = [[] for _ in texts]
        for group in _step_groups([len(text) for text in texts], self.context_tokens):
            if self._stop:
                raise EngineClosed("the engine was closed")
            vectors = self._step([texts[index] for index in group])
            for index, vector in zip(group, vectors, strict=True):
                embeddings[index] = _normalized(vector)
        return embeddings

    def _step(self, texts: list[Sequence[int]]) -> list[NDArray[np.float32]]:
        batch = self._batch
        api = self._api
        batch.clear()
        for seq, text in enumerate(texts):
            batch.add(seq, 0, text, range(len(text)))
        if self._memory:
            api.llama_memory_clear(self._memory, False)
            status = api.llama_decode(self._context, batch.native)
        else:
            status = api.llama_encode(self._context, batch.native)
        api.llama_synchronize(self._context)
        if status != 0:
            raise RuntimeError(f"llama.cpp failed with status {status}: {library().log.tail()}")
        return [self._vector(seq) for seq in range(len(texts))]

    def _vector(self, seq: int) -> NDArray[np.float32]:
        pointer = self._api.llama_get_embeddings_seq(self._context, seq)
        if not pointer:
            raise LocalchatError("the model returned no embedding")
        return float_array(pointer, (self.dimension,)).copy()

    def abort(self) -> None:
        """End after this step. From any thread."""
        self._stop = True

    def memory(self) -> MemoryReport:
        """Allocations that the library reported at the load."""
        return self._report

    def close(self) -> None:
        """Release context and weights. Idempotent."""
        if self._context:
            self._api.llama_free(self._context)
            self._context = 0
            self._weights.close()


def load_embedder(
    target: Target, pooling: str, request: LoadRequest, progress: Progress
) -> LlamaCppEmbedder:
    """Load the weights, create the context, and run a wide test step.

    Raises ModelInvalid, DoesNotFit, EngineClosed.
    """
    weights = load_weights(
        target.path,
        placement=Placement(request.plan.gpu_layers),
        safe_mode=request.safe_mode,
        total_bytes=target.total_bytes,
        progress=progress,
    )
    tokens = request.plan.context_tokens
    try:
        context, buffers = _open(weights, request, POOLING_NUMBERS[pooling], target.threads)
    except BaseException:
        weights.close()
        raise
    memory = report([*weights.buffers, *buffers], target.total_bytes)
    embedder = LlamaCppEmbedder(weights, context, memory, tokens)
    try:
        # Run a wide step first: the fault of AMX builds needs two rows.
        embedder.embed([[0] * tokens, [0], [0]])
    except BaseException:
        embedder.close()
        raise
    return embedder


def _open(
    weights: Weights, request: LoadRequest, pooling: int, threads: int
) -> tuple[int, list[Buffer]]:
    plan = request.plan
    parameters = library().api.llama_context_default_params()
    # llama.cpp sizes its graph for a multiple of the sequences. Pooling another width is SIGABRT.
    width = -(-plan.context_tokens // MAX_TEXTS) * MAX_TEXTS
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = width
    parameters.n_seq_max = MAX_TEXTS
    parameters.kv_unified = True
    parameters.embeddings = True
    parameters.pooling_type = pooling
    parameters.flash_attn_type = FLASH_AUTO if plan.flash_attention else FLASH_OFF
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.no_perf = True
    subject = f"Memory for texts of {plan.context_tokens} tokens"
    return new_context(weights, parameters, subject, hint="Try shorter texts (--ctx).")


def _step_groups(lengths: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
    """Group texts into steps, the longest first.

    Texts of a step then have similar lengths, and the widest step runs while the caller still expects to wait.
    """
    width = 0
    group = list[int]()
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        full = len(group) == MAX_TEXTS or width + lengths[index] > min(_STEP_TOKENS, limit)
        if group and full:
            yield tuple(group)
            width = 0
            group = []
        width += lengths[index]
        group.append(index)
    if group:
        yield tuple(group)


def _normalized(vector: NDArray[np.float32]) -> list[float]:
    wide = vector.astype(np.float64)
    length = float(np.linalg.norm(wide))
    if not np.isfinite(length):
        raise LocalchatError(
            "the model returned an embedding that is not a vector of numbers",
            hint="the model file may be damaged: download it again",
        )
    normalized: list[float] = (wide / length if length else wide).tolist()
    return normalized
