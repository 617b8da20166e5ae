"""The child process: `python -m localchat.core.process`, frames on its standard input and output.

Native code prints, so the pipes move to private descriptors at once and 1 goes where 2 goes: to the parent's
ring of log lines. SIGINT is the terminal's word to the whole group and not ours; the end of the input is.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from localchat import gc_control
from localchat.backend_api.interface import (
    Backend,
    Embedder,
    EmbeddingModel,
    LoadRequest,
    OpenModel,
    Runner,
)
from localchat.backend_api.selection import Selection, select_backend
from localchat.core.embedding import EmbeddingQueue
from localchat.core.engine_core import EngineCallbacks, EngineCore
from localchat.core.engine_info import MemoryUsage, engine_info, fingerprint
from localchat.core.event_sender import COALESCE_S
from localchat.core.input_processor import InputProcessor
from localchat.core.kv_cache import make_kv_cache_manager
from localchat.core.sequence import RequestState
from localchat.core.stats import EngineCounters
from localchat.engine.events import EngineStats, Event, Loading, MetricsSnapshot
from localchat.engine.interface import EngineInfo
from localchat.engine.local import protocol
from localchat.errors import EngineClosed, LocalchatError, UsageError
from localchat.fit.memory_plan import MemoryPlan

# The frames' pipes of a child, out of the reach of native code that prints.


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The frames' input and output, moved away from descriptors 0 and 1."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return source, sink


_INPUT_THREADS = 2
_GRACE_S = 1.0
_LOADING_GAP_S = 0.1


class EngineProcess:
    """One model, from its file to its last answer. The main thread loads and loops; a reader takes frames;
    desk threads answer what needs no step."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._frames: protocol.FrameReader[protocol.ToChild] = protocol.FrameReader(
            source, protocol.ToChild
        )
        self._writer = protocol.FrameWriter(sink)
        self._pool = ThreadPoolExecutor(_INPUT_THREADS, "desk")
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._closing = False
        self._preparing: set[int] = set()
        self._cancelled: set[int] = set()
        self._waiting_for_load: dict[int, RequestState] = {}
        self._engine_core: EngineCore | None = None
        self._runner: Runner | None = None
        self._embedding: EmbeddingQueue | None = None
        self._embedder: Embedder | None = None
        self._loaded_s = 0.0
        self._loading_told_s = 0.0
        self._notes: list[str] = []
        self._counts = EngineCounters()

    # ------------------------------------------------------------------------ main thread

    def run(self) -> int:
        """Serve until the input ends. Returns the exit status."""
        wish = next(iter(self._frames), None)
        if not isinstance(wish, protocol.Open):
            return 0 if wish is None else 2
        self._wish = wish
        self._path = Path(os.fsdecode(wish.model))
        try:
            self._open()
        except LocalchatError as error:
            self._fail(0, error)
            return 1
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        try:
            self._load()
        except LocalchatError as error:
            self._fail(0, error)
            return 0 if self._closing else 1
        gc_control.resume_gc()
        self._serve()
        self._model.close()
        return 0

    def _serve(self) -> None:
        """Until the end of the input."""
        if self._embedder is not None and self._embedding is not None:
            self._embedding.run(self._embedder)
            self._embedder.close()
            return
        assert self._engine_core is not None and self._runner is not None
        self._engine_core.run()
        self._runner.close()

    def _open(self) -> None:
        """Header and vocabulary: from here on requests can be accepted or refused."""
        wish = self._wish
        self._send(protocol.Entered("open"))
        self._selection: Selection = select_backend(self._path, wish.backend)
        backend: Backend = self._selection.backend
        self._build = backend.build_key()
        self._model: OpenModel = backend.open(self._path, self._say)
        self._plan: MemoryPlan = self._model.plan(wish.load)
        self._footprint = MemoryUsage(self._plan)
        self._fingerprint = fingerprint(
            self._model.info,
            self._plan.kv_type,
            self._selection.versions,
            head_int8=wish.load.head_int8,
        )
        for note in self._plan.notes:
            self._say(note)
        self._input_processor = InputProcessor(
            self._model, self._plan.context_tokens, wish.sampling, self._say
        )
        if self._model.info.pooling:
            self._embedding = EmbeddingQueue(
                cast(EmbeddingModel, self._model),
                wish.name,
                self._plan.context_tokens,
                self._counts,
                lambda id_, vectors, tokens: self._send(
                    protocol.VectorsReply(id_, vectors, tokens)
                ),
                self._fail,
            )
        self._ready.set()

    def _load(self) -> None:
        """Weights and warm-up, then the core with what was asked meanwhile."""
        began_s = time.perf_counter()
        self._safe = bool(self._build) and self._build in self._wish.safe_builds
        self._send(protocol.Entered("load", self._build))
        request = LoadRequest(self._plan, self._wish.load, safe_mode=self._safe)
        if self._embedding is not None:
            model = cast(EmbeddingModel, self._model)
            self._embedder = model.load_embedder(request, self._progress, self._say)
            self._footprint.measure(self._embedder.memory(), self._say)
            self._send(protocol.Entered("serve"))
            return
        runner = self._model.load(request, self._progress, self._say)
        self._loaded_s = time.perf_counter()
        self._load_s = self._loaded_s - began_s
        self._footprint.measure(runner.memory(), self._say)
        core = EngineCore(
            runner,
            self._model.tokenizer,
            make_kv_cache_manager(
                runner.capabilities, self._model.info.identity, self._plan.cache_ram_bytes
            ),
            EngineCallbacks(self._events, self._fail, self._say),
            fingerprint=self._fingerprint,
            speculation=self._wish.speculation,
            counts=self._counts,
            audit=self._wish.audit,
            coalesce_s=COALESCE_S,
        )
        self._send(protocol.Entered("serve"))
        with self._lock:
            self._runner, self._engine_core = runner, core
            early, self._waiting_for_load = self._waiting_for_load, {}
            if self._closing:
                core.stop()
            # Under the lock: a cancel that finds no early job any more must come behind its submission.
            for request_state in early.values():
                request_state.clock.loaded(self._loaded_s)
                core.submit(request_state)

    def _progress(self, done: int, total: int) -> bool:
        """Told ten times a second to every request that waits. At the end of the bytes comes the warm-up."""
        if done >= total:
            self._send(protocol.Entered("warmup", self._build))
        now_s = time.perf_counter()
        if now_s - self._loading_told_s >= _LOADING_GAP_S or done >= total:
            self._loading_told_s = now_s
            with self._lock:
                waiting = list(self._waiting_for_load)
            self._events([(id_, Loading(done, total)) for id_ in waiting])
        return not self._closing

    # ------------------------------------------------------------------------ the reader

    def _read(self) -> None:
        try:
            for frame in self._frames:
                if isinstance(frame, protocol.Close):
                    break
                self._take(frame)
        except protocol.FrameError:
            traceback.print_exc()
            os._exit(3)
        self._close()

    def _take(self, frame: protocol.ToChild) -> None:
        match frame:
            case protocol.Cancel(id_):
                self._cancel(id_)
            case protocol.Generate(id_, request):
                with self._lock:
                    self._preparing.add(id_)
                self._queue(id_, lambda: self._accept(protocol.Generate(id_, request)))
            case protocol.Tokenize(id_, text, special):
                self._reply(
                    id_,
                    lambda: protocol.TokensReply(
                        id_, self._input_processor.tokenize(text, special)
                    ),
                )
            case protocol.Detokenize(id_, tokens):
                self._reply(
                    id_, lambda: protocol.TextReply(id_, self._input_processor.detokenize(tokens))
                )
            case protocol.Render(id_, messages):
                self._reply(
                    id_, lambda: protocol.TextReply(id_, self._input_processor.render(messages))
                )
            case protocol.Embed(id_, texts):
                self._queue(id_, lambda: self._embed(id_, texts))
            case protocol.GetInfo(id_):
                self._reply(id_, lambda: protocol.InfoReply(id_, self._info()))
            case protocol.GetStats(id_):
                self._reply(id_, lambda: protocol.StatsReply(id_, self._stats()))
            case _:
                raise protocol.FrameError(f"a second {type(frame).__name__}")

    def _reply(self, id_: int, answer: Callable[[], msgspec.Struct]) -> None:
        self._queue(id_, lambda: self._send(answer()))

    def _queue(self, id_: int, task: Callable[[], None]) -> None:
        self._pool.submit(task).add_done_callback(lambda future: self._served(id_, future))

    def _served(self, id_: int, future: Future[None]) -> None:
        error = future.exception()
        if isinstance(error, LocalchatError):
            self._fail(id_, error)
        elif error is not None:  # a bug of ours: the engine ends as a crash, the trace in its log
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(4)

    def _close(self) -> None:
        """Leave: the core stops at its step's end, a load at its next report; the grace is short."""
        with self._lock:
            self._closing = True
            core = self._engine_core
        if core is not None:
            core.stop()
        if self._embedding is not None:
            self._embedding.stop()
        time.sleep(_GRACE_S)
        os._exit(0)

    # ------------------------------------------------------------------------ requests

    def _embed(self, id_: int, texts: tuple[str, ...]) -> None:
        if self._embedding is None:
            raise UsageError(
                f"{self._wish.name} writes text and gives no embeddings",
                hint="use an embedding model, such as nomic-embed-text or qwen3-embedding",
            )
        self._embedding.take(id_, texts)

    def _accept(self, ask: protocol.Generate) -> None:
        """At the desk: refuse, or accept and queue."""
        request_state = None
        try:
            try:
                if self._embedding is not None:
                    raise UsageError(
                        f"{self._wish.name} is an embedding model: it writes no text",
                        hint="name a model that does; this one answers at /v1/embeddings",
                    )
                request_state, accepted = self._input_processor.accept(ask.id, ask.request)
            except LocalchatError as error:
                self._counts.record_fail(error)
                raise
            # Not under the lock: the reader waits for that one, and the parent, busy writing, for the reader.
            self._events([(ask.id, accepted)])
        finally:
            self._finish_preparing(ask.id, request_state)

    def _finish_preparing(self, id_: int, request_state: RequestState | None) -> None:
        with self._lock:
            self._preparing.discard(id_)
            cancelled = id_ in self._cancelled
            self._cancelled.discard(id_)
            if request_state is not None and cancelled:
                self._counts.record_cancel()
            if request_state is None or cancelled:
                return
            if self._engine_core is None:
                self._waiting_for_load[id_] = request_state
            else:
                self._engine_core.submit(request_state)

    def _cancel(self, id_: int) -> None:
        with self._lock:
            if id_ in self._preparing:
                self._cancelled.add(id_)
                return
            if self._waiting_for_load.pop(id_, None) is not None:
                self._counts.record_cancel()
                return
            core = self._engine_core
        if core is not None:
            core.cancel(id_)

    # ------------------------------------------------------------------------ words

    def _events(self, items: list[tuple[int, Event]]) -> None:
        if items:
            self._send(protocol.Events(tuple(items)))

    def _send(self, frame: msgspec.Struct) -> None:
        try:
            self._writer.write(frame)
        except OSError:
            os._exit(0)  # the parent is gone

    def _say(self, text: str) -> None:
        self._notes.append(text)
        self._send(protocol.Notice(protocol.whole(text)))

    def _fail(self, id_: int, error: LocalchatError) -> None:
        if isinstance(error, EngineClosed) and self._closing:
            return
        whole = protocol.whole
        self._send(
            protocol.Failed(id_, error.code, whole(error.message), whole(error.hint), error.details)
        )

    def _stats(self) -> EngineStats:
        with self._lock:
            core, early = self._engine_core, list(self._waiting_for_load.values())
        if core is not None:
            return core.stats()
        if self._embedding is not None:
            return self._embedding.stats()
        return self._counts.stats(MetricsSnapshot(phase="loading", waiting=len(early)), early)

    def _info(self) -> EngineInfo:
        runner = self._runner
        return engine_info(
            self._wish,
            self._selection,
            self._model.info,
            self._plan,
            self._footprint,
            runner.capabilities if runner is not None else None,
            path=protocol.whole(str(self._path)),
            safe_mode=getattr(self, "_safe", False),
            fingerprint=self._fingerprint,
            notes=tuple(self._notes),
            warning=self._input_processor.warning,
        )


def main() -> int:
    """Entry of the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked where it was started
    gc_control.pause_gc()
    source, sink = private_pipes()
    status = EngineProcess(source, sink).run()
    sys.stderr.flush()
    # Threads of native code and of the pool must not hold the process back.
    os._exit(status)


if __name__ == "__main__":
    main()
