"""Runs an embedding model: whole texts in, one vector each out.

A text is pooled within one step, so a step holds whole texts only, and its width is the longest text that the
model reads. There is no padding, no cache and no draft.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import LoadRequest, MemoryReport, Progress
from localchat.errors import DoesNotFit, EngineClosed, LocalchatError
from localchat.model_files.architecture import POOLING_NUMBERS
from localchat_llamacpp.batch import Batch
from localchat_llamacpp.load import Target, report
from localchat_llamacpp.native import Buffer, library
from localchat_llamacpp.native_model import Placement, Weights, load_weights
from localchat_llamacpp.plan.embedding_plan import MOST_TEXTS

_STEP_TOKENS = 512
"""Short texts group a step up to this width; wider steps only make them wait longer."""
_FLASH_AUTO = -1
_FLASH_OFF = 0


class LlamaCppEmbedder:
    """Embedder over one native context. Used from one thread, apart from `abort`."""

    def __init__(
        self, weights: Weights, context: int, memory: MemoryReport, tokens: int, pooling: str
    ) -> None:
        """Own weights and context from here on."""
        self._api: Any = library().api
        self._weights = weights
        self._context = context
        self._report = memory
        self.context_tokens = tokens
        self.pooling = pooling
        # A reranker may have several labels, of which the first is the score.
        rank = pooling == "rank"
        self.dimension = 1 if rank else int(self._api.llama_model_n_embd_out(weights.handle))
        self._memory = self._api.llama_get_memory(context)
        self._batch = Batch(tokens, MOST_TEXTS)
        self._stop = False

    def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """A vector of length 1 for each text of 1 to `context_tokens` tokens; of a reranker, its score.

        Raises EngineClosed after `abort`, LocalchatError for a model that gives no numbers.
        """
        found: list[list[float]] = [[] for _ in texts]
        for group in _step_groups([len(text) for text in texts], self.context_tokens):
            if self._stop:
                raise EngineClosed("the engine was closed")
            vectors = self._step([texts[place] for place in group])
            for place, vector in zip(group, vectors, strict=True):
                found[place] = _score(vector) if self.pooling == "rank" else _normalised(vector)
        return found

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
            tail = "; ".join(library().log.tail(4))
            raise RuntimeError(f"llama.cpp failed with status {status}: {tail}")
        return [self._vector(seq) for seq in range(len(texts))]

    def _vector(self, seq: int) -> NDArray[np.float32]:
        pointer = self._api.llama_get_embeddings_seq(self._context, seq)
        if not pointer:
            raise LocalchatError("the model gave no embedding")
        where = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(where, (self.dimension,)).copy()

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
    """Load weights, make the context, run a step that meets faults of the build.

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
    embedder = LlamaCppEmbedder(weights, context, memory, tokens, pooling)
    try:
        # Wide first: the fault of AMX builds needs two rows.
        embedder.embed([[0] * tokens, [0], [0]])
    except BaseException:
        embedder.close()
        raise
    return embedder


def _open(
    weights: Weights, request: LoadRequest, pooling: int, threads: int
) -> tuple[int, list[Buffer]]:
    native = library()
    plan = request.plan
    parameters = native.api.llama_context_default_params()
    # A multiple of the sequences: llama.cpp measures its graph so, and pooling another width is SIGABRT.
    width = -(-plan.context_tokens // MOST_TEXTS) * MOST_TEXTS
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = width
    parameters.n_seq_max = MOST_TEXTS
    parameters.kv_unified = True
    parameters.embeddings = True
    parameters.pooling_type = pooling
    parameters.flash_attn_type = _FLASH_AUTO if plan.flash_attention else _FLASH_OFF
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.no_perf = True
    with native.log.capture() as captured:
        context = native.api.llama_init_from_model(weights.handle, parameters)
    if not context:
        raise DoesNotFit(
            f"Room for texts of {plan.context_tokens} tokens could not be made: "
            f"{captured.reason('llama.cpp gives no reason')}",
            hint="Try shorter texts (--ctx).",
        )
    return int(context), captured.buffers


def _step_groups(lengths: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Texts grouped in steps, the longest first.

    So those of a step are of a length, and the widest step comes while the caller still expects to wait.
    """
    width = 0
    places = list[int]()
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        full = len(places) == MOST_TEXTS or width + lengths[place] > min(_STEP_TOKENS, most)
        if places and full:
            yield tuple(places)
            width = 0
            places = []
        width += lengths[place]
        places.append(place)
    if places:
        yield tuple(places)


def _score(vector: NDArray[np.float32]) -> list[float]:
    score = float(vector[0])
    if not np.isfinite(score):
        raise LocalchatError(
            "the model gave a score that is not a number",
            hint="the model file may be damaged: download it again",
        )
    return [score]


def _normalised(vector: NDArray[np.float32]) -> list[float]:
    wide = vector.astype(np.float64)
    length = float(np.linalg.norm(wide))
    if not np.isfinite(length):
        raise LocalchatError(
            "the model gave an embedding that is not a vector of numbers",
            hint="the model file may be damaged: download it again",
        )
    found: list[float] = (wide / length if length else wide).tolist()
    return found
