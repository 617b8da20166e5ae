"""The engine process: `python -m localchat.core`, frames on its standard input and output.

Native code prints, so the pipes of the frames move to private descriptors at once, and descriptor 1 becomes a
copy of 2, which the parent stores as a ring of log lines. The process ignores SIGINT, which a terminal sends
to the whole group, and exits when its stdin closes.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, NoReturn, TypeAlias, cast

import msgspec

from localchat import gc_control
from localchat.backend_api.interface import Embedder, EmbeddingModel, LoadRequest, OpenModel, Runner
from localchat.backend_api.registry import BackendChoice, require_for_file
from localchat.chat_format.render_process import RenderProcess
from localchat.config.paths import file_state
from localchat.core.embedding import EmbeddingQueue
from localchat.core.engine_core import EngineCallbacks, EngineCore
from localchat.core.engine_info import MemoryUsage, ProcessState, engine_info, fingerprint
from localchat.core.event_sender import COALESCE_S, CPU_COALESCE_S
from localchat.core.input_processor import InputProcessor
from localchat.core.kv_cache import (
    KVCacheManager,
    PagedKVCacheManager,
    SlotKVCacheManager,
    make_kv_cache_manager,
)
from localchat.core.kv_cache.block_disk_tier import BlockDiskTier
from localchat.core.kv_cache.disk_tier import DiskTier
from localchat.core.kv_cache.slot_disk_tier import SlotDiskTier
from localchat.core.sequence import RequestState
from localchat.core.stats import EngineCounters
from localchat.engine.events import Accepted, EngineStats, Event, Loading, MetricsSnapshot
from localchat.engine.interface import EngineInfo
from localchat.engine.local import protocol
from localchat.errors import FAULT_STATUS, DeviceFault, EngineClosed, LocalchatError, UsageError
from localchat.fit.hardware import read_cores, read_cpus
from localchat.fit.memory_plan import MemoryPlan
from localchat.kv_store.store import KVStore
from localchat.units import counted

Tasks: TypeAlias = SimpleQueue[tuple[int, Callable[[], None]]]

_INPUT_THREADS = 2
_SWITCH_S = 0.0002
"""Time after which an input thread yields to the core's thread. With Python's default of 5 ms, each call of a
step that releases the interpreter's lock waited that long while prompts were tokenized."""
_STACK_BYTES = 128 << 20
"""Stack of a thread. llguidance recurses through the rules and definitions of a grammar: a long chain of them
overflowed the default of 8 MB, which ended the process. Only used pages take memory."""
_GRACE_S = 1.0
_WRITING_GRACE_S = 1.8
"""Time until the exit after stdin has closed, without and with writes of KV to disk."""
_LOADING_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose header and vocabulary are read. It can accept or reject requests."""

    path: Path
    choice: BackendChoice
    model: OpenModel
    plan: MemoryPlan
    memory: MemoryUsage
    input_processor: InputProcessor
    fingerprint: str
    build: str
    """Native build that will run (Backend.build_key)."""
    safe_mode: bool
    """The build is known to crash on this machine."""
    embedding: EmbeddingQueue | None
    """Set if the model computes embeddings and cannot generate text."""
    render_process: RenderProcess
    """Process that runs the chat template."""


class FrameSender:
    """Sends frames to the parent from any thread, and collects the notices for EngineInfo."""

    def __init__(self, sink: BinaryIO) -> None:
        self._writer = protocol.FrameWriter(sink)
        self.notes: list[str] = []
        self.closing = False
        """The parent disconnected, so requests that end with the engine do not count as failures."""

    def send(self, frame: msgspec.Struct) -> None:
        try:
            self._writer.write(frame)
        except OSError:
            # The parent has exited.
            os._exit(0)

    def events(self, items: Iterable[tuple[int, Event]]) -> None:
        if items := tuple(items):
            self.send(protocol.Events(items))

    def accepted(self, id_: int, event: Accepted, start: Callable[[], None]) -> None:
        """Send the first event of a request, and call `start` just before.

        Its other events wait for this frame, but its first step does not.
        """
        with self._writer.lock:
            start()
            self.events([(id_, event)])

    def notify(self, text: str) -> None:
        """Send a notice about the load to the user, and store it for EngineInfo."""
        self.notes.append(text)
        self.announce(text)

    def announce(self, text: str) -> None:
        """Send a notice about the moment to the user. Front ends that ask later do not get it."""
        self.send(protocol.Notice(protocol.sendable(text)))

    def fail(self, id_: int, error: LocalchatError) -> None:
        """Report a failed request. Id 0 stands for the whole engine."""
        if isinstance(error, EngineClosed) and self.closing:
            return
        self.send(protocol.Failed.of(id_, error))


class EngineProcess:
    """Engine process of one model, from its load to its last answer.

    The main thread loads the weights and runs the steps. A reader thread reads frames, and input threads handle
    everything that needs no step.
    """

    def __init__(
        self,
        spec: protocol.Open,
        opened: OpenedModel,
        frames: Iterable[protocol.ToChild],
        sender: FrameSender,
        counters: EngineCounters,
    ) -> None:
        self._spec = spec
        self._opened = opened
        # Reading the cores opens files, so it happens once.
        self._threads = spec.load.threads or read_cores()
        self._frames = frames
        self._sender = sender
        self._counters = counters
        self._tasks: Tasks = SimpleQueue()
        """Tasks of the input threads, by the id that an error of theirs names."""
        self._counts: Tasks = SimpleQueue()
        """Texts to tokenize without an answer, for a thread of their own: one may take half a minute."""
        self._lock = threading.Lock()
        self._preparing: set[int] = set()
        self._cancelled: set[int] = set()
        self._waiting_for_load: dict[int, RequestState] = {}
        self._loaded: EngineCore | None = None
        self._loading_sent_s = 0.0

    def run(self) -> int:
        """Load the model and serve until stdin closes. Return the exit status. Raises DeviceFault."""
        threading.stack_size(_STACK_BYTES)
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        for tasks in (*[self._tasks] * _INPUT_THREADS, self._counts):
            threading.Thread(target=self._work, args=(tasks,), name="input", daemon=True).start()
        try:
            embedding = self._opened.embedding
            loaded: EngineCore | Embedder
            if embedding is None:
                loaded = self._load_runner()
            else:
                loaded = self._load_embedder()
        except DeviceFault:
            raise
        except LocalchatError as error:
            self._sender.fail(0, error)
            return 0 if self._sender.closing else 1
        gc_control.resume_gc()
        if isinstance(loaded, EngineCore):
            loaded.run()
            loaded.runner.close()
        else:
            assert embedding is not None
            embedding.run(loaded)
            loaded.close()
        self._opened.model.close()
        return 0

    def _load_embedder(self) -> Embedder:
        model = cast(EmbeddingModel, self._opened.model)
        embedder = model.load_embedder(self._load_request(), self._progress, self._sender.notify)
        self._opened.memory.measure(embedder.memory())
        self._sender.send(protocol.Entered("serve"))
        return embedder

    def _load_runner(self) -> EngineCore:
        opened = self._opened
        sender = self._sender
        runner = opened.model.load(self._load_request(), self._progress, sender.notify)
        loaded_s = time.perf_counter()
        opened.memory.measure(runner.memory())
        kv_cache = make_kv_cache_manager(
            runner.capabilities, _kv_description(opened), opened.plan.cache_ram_bytes
        )
        disk_tier = self._disk_tier(runner, kv_cache)
        namespace = None
        if disk_tier is not None:
            namespace = disk_tier.namespace
        opened.input_processor.layouts.open(namespace)
        coalesce_s = CPU_COALESCE_S
        if runner.capabilities.depth > 1:
            coalesce_s = COALESCE_S
        loaded = EngineCore(
            runner,
            opened.model.tokenizer,
            kv_cache,
            EngineCallbacks(sender.events, sender.fail, sender.announce),
            fingerprint=opened.fingerprint,
            speculation=self._spec.speculation,
            counters=self._counters,
            coalesce_s=coalesce_s,
            disk_tier=disk_tier,
        )
        sender.send(protocol.Entered("serve"))
        self._submit_waiting(loaded, loaded_s)
        return loaded

    def _disk_tier(self, runner: Runner, kv_cache: KVCacheManager) -> DiskTier | None:
        spec = self._spec
        can = runner.capabilities
        if not spec.kv_folder or not (can.exports or can.host_blocks):
            return None
        folder = Path(os.fsdecode(spec.kv_folder))
        store = KVStore(folder, spec.kv_folder_bytes, self._sender.notify)
        description = _kv_description(self._opened)
        if isinstance(kv_cache, PagedKVCacheManager):
            return BlockDiskTier(store, description, spec.name, runner, kv_cache)
        assert isinstance(kv_cache, SlotKVCacheManager)
        return SlotDiskTier(store, description, spec.name, runner, kv_cache)

    def _load_request(self) -> LoadRequest:
        opened = self._opened
        self._sender.send(protocol.Entered("load", opened.build))
        return LoadRequest(opened.plan, self._spec.load, safe_mode=opened.safe_mode)

    def _submit_waiting(self, loaded: EngineCore, loaded_s: float) -> None:
        """Submit the requests that arrived during the load to the engine core."""
        with self._lock:
            self._loaded = loaded
            waiting = self._waiting_for_load
            self._waiting_for_load = {}
            if self._sender.closing:
                loaded.stop()
            # Hold the lock: a cancel must not reach the core before its request does.
            for request_state in waiting.values():
                request_state.timer.loaded(loaded_s)
                loaded.submit(request_state)

    def _progress(self, done: int, total: int) -> bool:
        """Send the progress of the load to every waiting request, ten times per second.

        The warm-up starts after the last byte.
        """
        if done >= total:
            self._sender.send(protocol.Entered("warmup", self._opened.build))
        now_s = time.perf_counter()
        if now_s - self._loading_sent_s >= _LOADING_INTERVAL_S or done >= total:
            self._loading_sent_s = now_s
            with self._lock:
                waiting = list(self._waiting_for_load)
            self._sender.events((id_, Loading(done, total)) for id_ in waiting)
        return not self._sender.closing

    def _read(self) -> None:
        try:
            for frame in self._frames:
                if isinstance(frame, protocol.Close):
                    break
                self._dispatch(frame)
        except protocol.FrameError:
            traceback.print_exc()
            os._exit(3)
        self._close()

    def _dispatch(self, frame: protocol.ToChild) -> None:
        processor = self._opened.input_processor
        match frame:
            case protocol.Cancel(id_):
                self._cancel(id_)
            case protocol.Generate(id_):
                with self._lock:
                    self._preparing.add(id_)
                self._tasks.put((id_, partial(self._accept, frame)))
            case protocol.Tokenize(id_, text, special):
                self._reply(
                    id_,
                    lambda: protocol.TokensReply(id_, processor.tokenize(text, special)),
                    self._counts,
                )
            case protocol.Detokenize(id_, tokens):
                self._reply(id_, lambda: protocol.TextReply(id_, processor.detokenize(tokens)))
            case protocol.Render(id_, messages):
                self._reply(id_, lambda: protocol.TextReply(id_, processor.render(messages)))
            case protocol.PromptTokens(id_, messages):
                self._reply(
                    id_,
                    lambda: protocol.TokensReply(id_, processor.prompt_tokens(messages)),
                    self._counts,
                )
            case protocol.Embed(id_):
                self._tasks.put((id_, partial(self._embed, frame)))
            case protocol.GetInfo(id_):
                self._reply(id_, lambda: protocol.InfoReply(id_, self._info()))
            case protocol.GetStats(id_):
                self._reply(id_, lambda: protocol.StatsReply(id_, self._stats()))
            case _:
                raise protocol.FrameError(f"a second {type(frame).__name__}")

    def _reply(
        self, id_: int, answer: Callable[[], msgspec.Struct], tasks: Tasks | None = None
    ) -> None:
        (tasks or self._tasks).put((id_, lambda: self._sender.send(answer())))

    def _close(self) -> None:
        """End the process. The core stops after its step, and a load at its next progress report."""
        with self._lock:
            self._sender.closing = True
            loaded = self._loaded
        if loaded is not None:
            loaded.stop()
        if self._opened.embedding is not None:
            self._opened.embedding.stop()
        time.sleep(_WRITING_GRACE_S if self._spec.kv_folder else _GRACE_S)
        self._opened.render_process.close()
        os._exit(0)

    def _work(self, tasks: Tasks) -> None:
        while True:
            id_, task = tasks.get()
            try:
                task()
            except LocalchatError as error:
                self._sender.fail(id_, error)
            except BaseException as error:  # noqa: BLE001 - a bug ends the engine, with a trace in its log
                traceback.print_exception(error)
                sys.stderr.flush()
                os._exit(4)

    def _embed(self, frame: protocol.Embed) -> None:
        if self._opened.embedding is None:
            raise UsageError(
                f"{self._spec.name!r} cannot compute embeddings",
                hint="use an embedding model, such as nomic-embed-text or qwen3-embedding",
                no_embeddings=True,
            )
        self._opened.embedding.submit(frame.id, frame.texts, truncate=frame.truncate)

    def _accept(self, frame: protocol.Generate) -> None:
        """Validate and tokenize a request, and submit it to the core."""
        try:
            if self._opened.embedding is not None:
                raise UsageError(
                    f"{self._spec.name!r} is an embedding model and cannot generate text",
                    hint="choose a text model; this one serves /v1/embeddings",
                )
            request_state, accepted = self._opened.input_processor.accept(frame.id, frame.request)
        except LocalchatError as error:
            self._counters.record_failure(error)
            self._finish_preparing(frame.id, None)
            raise
        except Exception as error:
            # The core does not know the request yet, so the others can go on.
            traceback.print_exception(error)
            problem = LocalchatError(
                f"the request cannot be prepared: {type(error).__name__}: {error}",
                hint="this is a bug in localchat; the log of the engine has the traceback",
            )
            self._counters.record_failure(problem)
            self._finish_preparing(frame.id, None)
            raise problem from error
        # Send without our lock. Sending waits for the parent to read, the parent may be waiting for our reader,
        # and the reader needs the lock.
        self._sender.accepted(
            frame.id, accepted, partial(self._finish_preparing, frame.id, request_state)
        )

    def _finish_preparing(self, id_: int, request_state: RequestState | None) -> None:
        with self._lock:
            self._preparing.discard(id_)
            cancelled = id_ in self._cancelled
            self._cancelled.discard(id_)
            if request_state is not None and cancelled:
                self._counters.record_cancel()
            if request_state is None or cancelled:
                return
            if self._loaded is None:
                self._waiting_for_load[id_] = request_state
            else:
                self._loaded.submit(request_state)

    def _cancel(self, id_: int) -> None:
        with self._lock:
            if id_ in self._preparing:
                self._cancelled.add(id_)
                return
            if self._waiting_for_load.pop(id_, None) is not None:
                self._counters.record_cancel()
                return
            loaded = self._loaded
        if loaded is not None:
            loaded.cancel(id_)

    def _stats(self) -> EngineStats:
        with self._lock:
            loaded = self._loaded
            waiting = list(self._waiting_for_load.values())
        if loaded is not None:
            return loaded.stats()
        if self._opened.embedding is not None:
            return self._opened.embedding.stats()
        now = MetricsSnapshot(phase="loading", waiting=len(waiting))
        return self._counters.stats(now, waiting)

    def _info(self) -> EngineInfo:
        opened = self._opened
        loaded = self._loaded
        return engine_info(
            self._spec,
            opened.choice,
            opened.model.info,
            opened.plan,
            opened.memory,
            loaded.runner.capabilities if loaded is not None else None,
            ProcessState(
                path=protocol.sendable(str(opened.path)),
                safe_mode=opened.safe_mode,
                threads=self._threads,
                fingerprint=opened.fingerprint,
                notes=tuple(self._sender.notes),
                warning=opened.input_processor.warning,
                sampling=opened.input_processor.sampling,
                tokenizer=opened.input_processor.tokenizer_info,
            ),
        )


def _kv_description(opened: OpenedModel) -> str:
    """Return everything that the KV of given tokens depends on, besides the KV type."""
    plan = opened.plan
    parts = [
        *(opened.fingerprint, opened.model.info.identity, opened.build, opened.choice.backend.name),
        *(f"{opened.safe_mode=}", f"{plan.flash_attention=}", f"{plan.window_only=}"),
        *(f"{plan.gpu_layers=}", *map(str, file_state(opened.path)[1:])),
        *(f"{name} {version}" for name, version in opened.choice.availability.versions),
    ]
    return "\0".join(parts)


def open_model(
    spec: protocol.Open,
    sender: FrameSender,
    counters: EngineCounters,
    render_process: RenderProcess,
) -> OpenedModel:
    """Read header and vocabulary, and plan the memory. Raises ModelMissing, ModelInvalid, DoesNotFit."""
    path = Path(os.fsdecode(spec.model))
    sender.send(protocol.Entered("open"))
    choice = require_for_file(path, spec.backend, spec.load)
    build = choice.backend.build_key()
    model = choice.backend.open(path, sender.notify)
    plan = model.plan(spec.load)
    if len(model.info.adapters) != len(spec.load.lora):
        raise UsageError(
            f"the backend {choice.backend.name} cannot apply LoRA adapters; llama.cpp can",
            hint="run a GGUF of the model with --backend llamacpp",
        )
    memory = MemoryUsage(plan)
    for note in plan.notes:
        sender.notify(note)
    input_processor = InputProcessor(
        model, plan.context_tokens, spec.sampling, sender.notify, render_process
    )
    if not model.info.chat_template or model.info.pooling:
        # There is no chat template to render.
        render_process.close()
    embedding = None
    if model.info.pooling:
        embedding = EmbeddingQueue(
            cast(EmbeddingModel, model),
            spec.name,
            plan.context_tokens,
            counters,
            lambda id_, vectors, tokens: sender.send(protocol.VectorsReply(id_, vectors, tokens)),
            sender.fail,
        )
    return OpenedModel(
        path=path,
        choice=choice,
        model=model,
        plan=plan,
        memory=memory,
        input_processor=input_processor,
        fingerprint=fingerprint(model.info, plan.kv_type, choice.availability.versions, spec.load),
        build=build,
        safe_mode=bool(build) and build in spec.safe_builds,
        embedding=embedding,
        render_process=render_process,
    )


def limit_threads(spec: protocol.Open, notify: Callable[[str], None]) -> protocol.Open:
    """Return the options with one compute thread per CPU at most.

    In each layer, all threads wait for the last one. SmolLM2 wrote 17 tok/s with 16 threads on two cores, and
    about 130 with two.
    """
    cpus = read_cpus()
    if spec.load.threads <= cpus:
        return spec
    asked = f"--threads {spec.load.threads}"
    notify(f"Using {counted(cpus, 'thread')}: {asked} is more than this computer runs at once.")
    load = msgspec.structs.replace(spec.load, threads=cpus)
    return msgspec.structs.replace(spec, load=load)


def serve(source: BufferedIOBase, sink: BinaryIO, render_process: RenderProcess) -> int:
    """Run an engine over two pipes. The first frame names the model. Return the exit status."""
    frames = protocol.read_frames(source, protocol.ToChild)
    spec = next(frames, None)
    if not isinstance(spec, protocol.Open):
        return 0 if spec is None else 2
    sender = FrameSender(sink)
    spec = limit_threads(spec, sender.notify)
    counters = EngineCounters()
    try:
        opened = open_model(spec, sender, counters, render_process)
    except LocalchatError as error:
        sender.fail(0, error)
        return 1
    try:
        return EngineProcess(spec, opened, frames, sender, counters).run()
    except DeviceFault as fault:
        sys.stderr.write(f"{fault}\n")
        return FAULT_STATUS


def private_pipes() -> tuple[BufferedIOBase, BinaryIO]:
    """Move the frames' pipes away from descriptors 0 and 1. Native code prints to these."""
    source = os.fdopen(os.dup(0), "rb")
    sink = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return source, sink


def main(render_process: RenderProcess) -> NoReturn:
    """Serve over stdin and stdout, then end the process."""
    source, sink = private_pipes()
    sys.setswitchinterval(_SWITCH_S)
    with closing(render_process):
        status = serve(source, sink, render_process)
    sys.stderr.flush()
    # Threads of native code and of the pool must not delay the exit.
    os._exit(status)
