"""Reads pictures and recordings: divides them into chunks, and computes the embeddings of the chunks.

The projector is loaded with the first attachment that is not known, so text costs nothing, and neither does a
question about a picture whose KV is cached. Chunks are made in the threads that prepare requests. One thread
of this module computes their embeddings, beside the steps of other requests.
"""

import ctypes
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from weakref import WeakValueDictionary, finalize

import msgspec
import numpy as np
from numpy.typing import NDArray

from localchat.backend_api.interface import MemoryReport
from localchat.backend_api.media import LayoutStore, MediaChunk, MediaPiece, placeholder_ids
from localchat.errors import EngineClosed, LocalchatError, ModelInvalid, UsageError
from localchat.media.decode import decode_audio, decode_image
from localchat.model_files.projector import Projector
from localchat_llamacpp.compute_turns import ComputeTurns
from localchat_llamacpp.media_api import (
    AUDIO,
    TEXT,
    DecoderPosition,
    EvalCallback,
    InputPart,
    media_library,
    uses_mrope,
)
from localchat_llamacpp.native import Buffer, library
from localchat_llamacpp.plan.buffers import encoder_compute_bytes

_LAYOUTS: Final = 512
"""Attachments that are known by their chunks. The next turn of a conversation does not decode them again."""
_PREPARED: Final = 4
"""Limit on attachments whose pixels stay in memory until they are encoded. Others are decoded again."""
_NODES_PER_PART: Final = 8
"""Nodes of the encoder's graph that are computed in one turn: a third of a layer."""

FloatArray = NDArray[np.float32]


class Native:
    """A native object, freed with this one."""

    def __init__(self, handle: int, free: Callable[[int], None]) -> None:
        self.handle = handle
        self._finalizer = finalize(self, free, handle)


_Part: TypeAlias = tuple[int, ...] | Native
"""Part of an attachment: tokens of text, or a native chunk with its pixels."""


class _Layout(msgspec.Struct, frozen=True):
    """A chunk without its pixels."""

    tokens: int
    positions: int
    """Positions that the chunk takes. Fewer than its tokens where positions have several dimensions."""
    whole: bool
    audio: bool
    divisible: bool
    """Whether a cached text may end inside it."""


_Layouts: TypeAlias = tuple[tuple[int, ...] | _Layout, ...]
"""Parts of an attachment: tokens of text, or chunks."""
_STORED: Final = msgspec.msgpack.Decoder(_Layouts)


class Chunk:
    """A MediaChunk of llama.cpp."""

    def __init__(self, layout: _Layout, source: "_Attachment", number: int, *, mrope: bool) -> None:
        self._layout = layout
        self._mrope = mrope
        self._placeholder: Native | None = None
        self.source = source
        self.number = number
        """Number among the chunks of the attachment."""
        self.ids = placeholder_ids(
            source.digest, layout.tokens, divisible=layout.divisible, index=number
        )
        self.whole = layout.whole
        self.positions = layout.positions
        """Positions that the chunk takes."""
        self.embeddings: FloatArray | None = None
        """(tokens, width), None until they are computed."""

    @property
    def encoded(self) -> bool:
        """See MediaChunk."""
        return self.embeddings is not None

    def encode(self, embeddings: FloatArray, native: Native) -> None:
        """Set the embeddings. native: the chunk with its pixels, of which only the shape is kept."""
        api = media_library()
        if self._mrope and not self._layout.audio:
            placeholder = api.mtmd_input_chunk_get_placeholder(native.handle)
            self._placeholder = Native(placeholder, api.mtmd_input_chunk_free)
        self.embeddings = embeddings

    def token_positions(self, start: int) -> NDArray[np.int32]:
        """Return the positions of the tokens, (1 or 4, tokens). start: the position of the first.

        Only of an encoded chunk.
        """
        tokens = len(self.ids)
        line = np.arange(start, start + tokens, dtype=np.int32)
        if not self._mrope:
            return line[None]
        if self._layout.audio:
            return np.stack([line] * 4)
        api = media_library()
        assert self._placeholder is not None, "the chunk was not encoded"
        image = api.mtmd_input_chunk_get_tokens_image(self._placeholder.handle)
        places = (DecoderPosition * tokens)()
        api.mtmd_helper_image_get_decoder_pos(image, start, places)
        fields = np.frombuffer(bytes(places), np.int32).reshape(tokens, 4)
        # The order of llama.cpp's dimensions is t, y, x, z.
        return np.ascontiguousarray(fields[:, [0, 2, 1, 3]].T)


@dataclass(frozen=True, slots=True)
class _Attachment:
    """An attachment as the user sent it."""

    kind: str
    data: bytes
    name: str
    digest: bytes


@dataclass(slots=True)
class _Job:
    """Chunks to encode."""

    chunks: Sequence[Chunk]
    then: Callable[[LocalchatError | None], None]
    cancelled: bool = False


@dataclass(slots=True)
class _MtmdContext:
    """The loaded projector."""

    handle: int
    callback: object
    """Reference that keeps the callback alive."""
    width: int
    """Numbers of a token's embedding."""
    rate: int
    """Samples per second of recordings."""
    buffers: list[Buffer]


class MediaEncoder:
    """The projector of one model. Thread-safe."""

    def __init__(self, projector: Projector) -> None:
        self._projector = projector
        self._threads = 1
        self._use_gpu = False
        self.turns = ComputeTurns()
        self._model = 0
        self._mrope = False
        self._weights_loaded = threading.Event()
        self._lock = threading.Lock()
        """Guards the load, and the caches."""
        self._context: _MtmdContext | None = None
        self._closed = False
        self._layouts: OrderedDict[bytes, _Layouts] = OrderedDict()
        self._prepared: OrderedDict[bytes, tuple[Native, ...]] = OrderedDict()
        self._chunks: WeakValueDictionary[tuple[bytes, int], Chunk] = WeakValueDictionary()
        """Chunks of all requests, so that two with the same picture encode it once."""
        self._worker = ThreadPoolExecutor(1, "media-encoder")
        self._job: _Job | None = None
        """Job of the running graph. None in the warm-up of the load."""
        self._nodes = 0
        """Nodes of the graph that were announced."""
        stat = projector.path.stat()
        self.identity = f"{projector.path.name} {stat.st_size} {stat.st_mtime_ns}"
        """Names everything that the embeddings of given data depend on."""

    def attach(self, model: int, *, threads: int, use_gpu: bool) -> None:
        """Set the weights of the language model, which outlive this reader.

        threads: those of the encoder. use_gpu: whether it computes on the library's GPU.
        """
        self._model = model
        self._mrope = uses_mrope(model)
        self._threads = threads
        self._use_gpu = use_gpu
        self._weights_loaded.set()

    def memory(self, report: MemoryReport) -> MemoryReport:
        """Add the projector to a report. Before the first attachment, its buffers count as planned."""
        compute_bytes = encoder_compute_bytes(self._projector)
        if self._context is not None:
            compute_bytes = sum(buffer.size_bytes for buffer in self._context.buffers)
        return report._replace(
            weights_bytes=report.weights_bytes + self._projector.header.weights_bytes,
            compute_bytes=report.compute_bytes + compute_bytes,
        )

    def pieces(
        self, kind: str, data: bytes, name: str, salt: str, store: LayoutStore
    ) -> tuple[MediaPiece, ...]:
        """See MediaModel.media_pieces."""
        if kind not in self._projector.kinds:
            kinds = " and ".join(self._projector.kinds)
            raise UsageError(
                f"{name or 'the attachment'} is of the kind {kind}; this model reads {kinds}"
            )
        digest = hashlib.blake2b(digest_size=32)
        for part in (self.identity.encode(), salt.encode("utf-8", "replace"), kind.encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
        digest.update(data)
        source = _Attachment(kind, data, name, digest.digest())
        self._weights_loaded.wait()
        layouts = self._known_layouts(source, store) or self._divide(source, store)
        pieces: list[MediaPiece] = []
        number = 0
        for layout in layouts:
            if isinstance(layout, tuple):
                pieces.append(layout)
                continue
            with self._lock:
                chunk = self._chunks.get((source.digest, number))
                if chunk is None:
                    chunk = Chunk(layout, source, number, mrope=self._mrope)
                    self._chunks[source.digest, number] = chunk
            pieces.append(chunk)
            number += 1
        return tuple(pieces)

    def encode(
        self, chunks: Sequence[MediaChunk], then: Callable[[LocalchatError | None], None]
    ) -> Callable[[], None]:
        """See MediaRunner."""
        job = _Job([chunk for chunk in chunks if isinstance(chunk, Chunk)], then)

        def cancel() -> None:
            job.cancelled = True

        self._worker.submit(self._run, job)
        return cancel

    def close(self) -> None:
        """Stop the encoder and release the projector. Idempotent."""
        self._closed = True
        self._worker.shutdown(cancel_futures=True)
        with self._lock:
            self._layouts.clear()
            self._prepared.clear()
            if self._context is not None:
                media_library().mtmd_free(self._context.handle)
                self._context = None

    def _loaded(self) -> _MtmdContext:
        """Load the projector at the first call. Waits for the weights of the language model."""
        self._weights_loaded.wait()
        with self._lock:
            if self._closed:
                raise EngineClosed("the engine was closed")
            if self._context is None:
                self._context = self._load()
            return self._context

    def _load(self) -> _MtmdContext:
        api = media_library()
        parameters = api.mtmd_context_params_default()
        parameters.use_gpu = self._use_gpu
        parameters.n_threads = self._threads
        parameters.print_timings = False
        parameters.cb_eval = callback = EvalCallback(self._evaluated)
        path = self._projector.path
        with library().log.capture() as captured:
            handle = api.mtmd_init_from_file(os.fsencode(path), self._model, parameters)
        if not handle:
            raise ModelInvalid(
                f"{path.name} cannot be loaded, so this model cannot read attachments: "
                f"{captured.reason()}",
                hint="Download the mmproj file of the same repository as the model, and name it with --mmproj.",
            )
        return _MtmdContext(
            int(handle),
            callback,
            int(api.llama_model_n_embd_inp(self._model)),
            int(api.mtmd_get_audio_sample_rate(handle)),
            captured.buffers,
        )

    def _known_layouts(self, source: _Attachment, store: LayoutStore) -> _Layouts | None:
        """Return the parts of an attachment that was read before, also by an earlier process."""
        with self._lock:
            layouts = self._layouts.get(source.digest)
            if layouts is not None:
                self._layouts.move_to_end(source.digest)
                return layouts
        stored = store.read(source.digest)
        if stored is None:
            return None
        try:
            layouts = _STORED.decode(stored)
        except msgspec.DecodeError:
            return None
        with self._lock:
            self._remember(source, layouts)
        return layouts

    def _remember(self, source: _Attachment, layouts: _Layouts) -> None:
        self._layouts[source.digest] = layouts
        while len(self._layouts) > _LAYOUTS:
            self._layouts.popitem(last=False)

    def _divide(self, source: _Attachment, store: LayoutStore) -> _Layouts:
        """Decode an attachment, and divide it into text and chunks."""
        context = self._loaded()
        parts = self._tokenized(context, source)
        api = media_library()
        layouts: list[tuple[int, ...] | _Layout] = []
        for part in parts:
            if isinstance(part, tuple):
                layouts.append(part)
                continue
            tokens = int(api.mtmd_input_chunk_get_n_tokens(part.handle))
            positions = int(api.mtmd_input_chunk_get_n_pos(part.handle))
            non_causal = bool(api.mtmd_decode_use_non_causal(context.handle, part.handle))
            audio = api.mtmd_input_chunk_get_type(part.handle) == AUDIO
            divisible = not non_causal and (audio or not self._mrope)
            layouts.append(_Layout(tokens, positions, non_causal, audio, divisible))
        result = tuple(layouts)
        with self._lock:
            self._remember(source, result)
            self._prepare(source, parts)
        store.write(source.digest, msgspec.msgpack.encode(result))
        return result

    def _prepare(self, source: _Attachment, parts: Sequence[_Part]) -> tuple[Native, ...]:
        """Keep the pixels of an attachment until its chunks are encoded. Return the chunks."""
        prepared = tuple(part for part in parts if isinstance(part, Native))
        self._prepared[source.digest] = prepared
        while len(self._prepared) > _PREPARED:
            self._prepared.popitem(last=False)
        return prepared

    def _tokenized(self, context: _MtmdContext, source: _Attachment) -> list[_Part]:
        """Decode an attachment, and return its parts."""
        api = media_library()
        bitmap, pixels = self._bitmap(context, source)
        chunks = api.mtmd_input_chunks_init()
        try:
            inputs = (ctypes.POINTER(InputPart) * 1)(ctypes.pointer(InputPart(None, bitmap)))
            with library().log.capture() as captured:
                status = api.mtmd_tokenize_from_parts(context.handle, chunks, inputs, 1, False)
            if status:
                raise UsageError(
                    f"{source.name or 'the attachment'} cannot be prepared for this model: "
                    f"{captured.reason()}",
                    hint="very long and narrow pictures are too much for some encoders; crop it",
                )
            parts: list[_Part] = []
            for index in range(api.mtmd_input_chunks_size(chunks)):
                chunk = api.mtmd_input_chunks_get(chunks, index)
                if api.mtmd_input_chunk_get_type(chunk) == TEXT:
                    count = ctypes.c_size_t()
                    ids = api.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
                    parts.append(self._text_tokens(tuple(ids[: count.value])))
                else:
                    copy = api.mtmd_input_chunk_copy(chunk)
                    parts.append(Native(copy, api.mtmd_input_chunk_free))
            return parts
        finally:
            api.mtmd_input_chunks_free(chunks)
            api.mtmd_bitmap_free(bitmap)
            del pixels

    def _text_tokens(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens of the text around a picture.

        Raises ModelInvalid where llama.cpp found no token for a marker, as with the projector of another model.
        """
        if min(ids, default=0) < 0:
            raise ModelInvalid(
                f"The model's vocabulary lacks a marker that {self._projector.path.name} puts around pictures.",
                hint="Use the projector (mmproj) that was published with this model.",
            )
        return ids

    def _bitmap(self, context: _MtmdContext, source: _Attachment) -> tuple[int, object]:
        """Return a native bitmap of an attachment, and the data that it points to."""
        api = media_library()
        if source.kind == "image":
            image = decode_image(source.data, source.name)
            return int(api.mtmd_bitmap_init(image.width, image.height, image.rgb)), image
        samples = decode_audio(source.data, context.rate, source.name)
        samples = np.ascontiguousarray(samples, np.float32)
        pointer = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        return int(api.mtmd_bitmap_init_from_audio(len(samples), pointer)), samples

    def _run(self, job: _Job) -> None:
        """Encode the chunks of a job. Body of the encoder's thread."""
        failure: LocalchatError | None = None
        try:
            for chunk in job.chunks:
                if not (chunk.encoded or job.cancelled):
                    self._encode_chunk(job, chunk)
        except LocalchatError as error:
            failure = error
        except MemoryError:
            failure = LocalchatError("there is not enough memory to encode the attachment")
        job.then(failure)

    def _encode_chunk(self, job: _Job, chunk: Chunk) -> None:
        context = self._loaded()
        native = self._native_chunk(context, chunk)
        api = media_library()
        self._job = job
        self._nodes = 0
        self.turns.begin_encoding()
        try:
            status = api.mtmd_encode_chunk(context.handle, native.handle)
        finally:
            self.turns.end_encoding()
        if job.cancelled:
            return
        if status:
            name = chunk.source.name or "the attachment"
            raise LocalchatError(f"{name} could not be encoded: {library().log.tail()}")
        output = api.mtmd_get_output_embd(context.handle)
        shape = (len(chunk.ids), context.width)
        embeddings = np.ctypeslib.as_array(output, shape).copy()
        if not np.isfinite(embeddings).all():
            raise LocalchatError(
                f"the encoder gave no usable numbers for {chunk.source.name or 'the attachment'}",
                hint="The mmproj file may be damaged, or of another model.",
            )
        chunk.encode(embeddings, native)

    def _native_chunk(self, context: _MtmdContext, chunk: Chunk) -> Native:
        """Return the chunk with its pixels, decoded again if they were dropped."""
        digest = chunk.source.digest
        with self._lock:
            prepared = self._prepared.get(digest)
        if prepared is None:
            parts = self._tokenized(context, chunk.source)
            with self._lock:
                prepared = self._prepare(chunk.source, parts)
        return prepared[chunk.number]

    def _evaluated(self, _tensor: int, ask: bool, _user: Any) -> bool:  # noqa: ANN401 - a null pointer
        """Divide the encoder's graph into parts, and let a step compute between two of them.

        Called natively in the encoder's thread.
        """
        if ask:
            self._nodes += 1
            return self._nodes % _NODES_PER_PART == 0
        if self._job is None:
            return True
        self.turns.end_encoding()
        self.turns.begin_encoding()
        return not (self._job.cancelled or self._closed)
