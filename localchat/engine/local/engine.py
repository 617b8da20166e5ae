"""LocalEngine: a model in a child process on this machine."""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from localchat.config.paths import CRASH_RECORD
from localchat.engine.events import (
    Accepted,
    Done,
    Event,
    Loading,
    MetricsSnapshot,
    Queued,
)
from localchat.engine.local import protocol
from localchat.engine.local.crash_record import CrashRecord
from localchat.engine.local.process import ChildProcess
from localchat.engine.local.queries import FrameQueries, Reply
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest
from localchat.engine.stream import SIGNAL_POLL_S, Stream, put_together
from localchat.errors import FAULT_STATUS, EngineClosed, EngineDied, LocalchatError, UsageError

if TYPE_CHECKING:
    import asyncio

_BEFORE_OUTPUT = (Loading, Queued, MetricsSnapshot)
_SAFE_MODE_FAILED = (
    "safe mode did not help: the file may be damaged, or the backend has a bug with such models; download the "
    "file again, or update localchat"
)
_CRASHES = frozenset({"SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT"})


class _Query:
    """A query to the child process, and its answer."""

    def __init__(self, frame: msgspec.Struct) -> None:
        self.frame = frame
        self._done = threading.Event()
        self._answer: msgspec.Struct | LocalchatError | None = None

    def set_answer(self, answer: msgspec.Struct | LocalchatError) -> None:
        self._answer = answer
        self._done.set()

    def wait(self, kind: type[Reply]) -> Reply:
        while not self._done.wait(SIGNAL_POLL_S):
            pass
        if isinstance(self._answer, LocalchatError):
            raise self._answer
        assert isinstance(self._answer, kind)
        return self._answer


@dataclass(slots=True)
class _PendingRequest:
    """A request that is not complete."""

    request: GenerateRequest
    stream: Stream
    accepted: bool = False
    begun: bool = False
    """Whether it sent more than Accepted, so that it cannot be restarted."""

    def record(self, event: Event) -> bool:
        """Record the progress of the request. Return False for an event that was sent before."""
        if self.begun:
            return True
        if isinstance(event, Accepted):
            if self.accepted:
                # The child was restarted after a crash during warm-up.
                return False
            self.accepted = True
            self.request = _with_seed(self.request, event.seed)
        elif not isinstance(event, _BEFORE_OUTPUT):
            self.begun = True
        return True


class LocalEngine(FrameQueries):
    """See Engine. The child starts immediately. After its death, the next call starts another one.

    A child that dies during load or warm-up is restarted once in safe mode, and its build is recorded.
    """

    def __init__(self, options: EngineOptions, *, notify: Callable[[str], None]) -> None:
        """notify: receives sentences for the user, from a thread of the engine."""
        self._options = options
        self._notify = notify
        self._crash_record = CrashRecord(
            options.state_dir / CRASH_RECORD if options.state_dir else None
        )
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._requests: dict[int, _PendingRequest] = {}
        self._queries: dict[int, _Query] = {}
        self._load_error: LocalchatError | None = None
        self._closed = False
        self._child: ChildProcess | None = None
        with self._lock:
            self._running_child()

    def generate(self, request: GenerateRequest) -> Stream:
        id_ = next(self._ids)
        stream = Stream(lambda: self._cancel(id_), self._read_in)
        with self._lock:
            try:
                child = self._running_child()
            except LocalchatError as error:
                stream.put(error)
                return stream
            self._requests[id_] = _PendingRequest(request, stream)

        def sent() -> None:
            with self._lock:
                cancelled = id_ not in self._requests
            if cancelled:
                # The first cancel may have reached the child before the request.
                child.send(protocol.Cancel(id_))

        try:
            child.send_soon(protocol.Generate(id_, request), sent)
        except UsageError as error:
            self._fail(id_, error)
        return stream

    def close(self, deadline_s: float = 2.0) -> None:
        with self._lock:
            self._closed = True
            child = self._child
            self._child = None
        if child is not None:
            child.send(protocol.Close())
            child.stop(deadline_s)
        self._fail_all(EngineClosed("the model was unloaded"))

    @property
    def alive(self) -> bool:
        """Whether a child process is running. Otherwise the next call starts one."""
        return self.child_pid is not None

    @property
    def child_pid(self) -> int | None:
        """Process id of the child, None if it is not running."""
        child = self._child
        if child is not None and child.alive():
            return child.pid
        return None

    def _running_child(self) -> ChildProcess:
        """Return the child process, and start it if necessary. Call with the lock held."""
        if self._closed:
            raise EngineClosed("the model was unloaded")
        if self._child is None:
            self._load_error = None
            self._child = ChildProcess(self._on_frame, self._on_exit)
            options = self._options
            self._child.send(
                protocol.Open(
                    model=os.fsencode(options.model),
                    name=protocol.sendable(options.name or options.model.stem),
                    backend=options.backend,
                    load=options.load,
                    speculation=options.speculation,
                    safe_builds=self._crash_record.known(),
                    sampling=options.sampling,
                    kv_folder=os.fsencode(options.kv_folder or ""),
                    kv_folder_bytes=options.kv_folder_bytes,
                )
            )
        return self._child

    def _query(self, make_frame: Callable[[int], protocol.Query], kind: type[Reply]) -> Reply:
        id_ = next(self._ids)
        query = _Query(make_frame(id_))
        with self._lock:
            child = self._running_child()
            self._queries[id_] = query
        # The caller may block the event loop that reads.
        child.read_in_thread()
        try:
            child.send(query.frame)
        except UsageError as error:
            self._fail(id_, error)
        return query.wait(kind)

    def _read_in(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Read events in the event loop that waits for them."""
        child = self._child
        if child is not None:
            child.read_in(loop)

    def _cancel(self, id_: int) -> None:
        with self._lock:
            child = self._child if self._requests.pop(id_, None) is not None else None
            if child is not None and not self._requests:
                child.read_in_thread()
        if child is not None:
            child.send_soon(protocol.Cancel(id_))

    def _on_frame(self, frame: protocol.FromChild) -> None:
        match frame:
            case protocol.Events(items):
                self._deliver(items)
            case protocol.Failed(id_):
                self._fail(id_, frame.error())
            case protocol.Notice(text):
                self._notify(text)
            case protocol.Entered(phase):
                if phase == "serve":
                    self._remember_safe_mode()
            case _:
                with self._lock:
                    query = self._queries.pop(frame.id, None)
                if query is not None:
                    query.set_answer(frame)

    def _deliver(self, items: Sequence[tuple[int, Event]]) -> None:
        """Deliver the events of a frame.

        A stream gets its events together, so that its reader is woken once.
        """
        by_request: dict[int, list[Event]] = {}
        for id_, event in items:
            by_request.setdefault(id_, []).append(event)
        batches = []
        with self._lock:
            for id_, events in by_request.items():
                pending = self._requests.get(id_)
                # A cancelled request is missing.
                if pending is not None:
                    new = [event for event in events if pending.record(event)]
                    batches.append((pending.stream, new))
                    # A stream that is being closed cancels its request itself.
                    if isinstance(events[-1], Done):
                        del self._requests[id_]
            put_together(batches)
            if not self._requests and self._child is not None:
                self._child.read_in_thread()

    def _fail(self, id_: int, error: LocalchatError) -> None:
        if id_ == 0:
            with self._lock:
                self._load_error = error
            self._fail_all(error)
            return
        with self._lock:
            pending = self._requests.pop(id_, None)
            query = self._queries.pop(id_, None)
        if pending is not None:
            pending.stream.put(error)
        if query is not None:
            query.set_answer(error)

    def _fail_all(self, error: LocalchatError) -> None:
        with self._lock:
            pending = self._requests
            self._requests = {}
            queries = self._queries
            self._queries = {}
        for request in pending.values():
            request.stream.put(error)
        for query in queries.values():
            query.set_answer(error)

    def _on_exit(self, child: ChildProcess) -> None:
        """Handle the end of the child process. Called from its reader thread."""
        death = child.death()
        notices: list[str] = []
        with self._lock:
            if self._child is not child:
                # `close` ended it.
                return
            self._child = None
            restarted = self._load_error is None and self._restart_in_safe_mode(
                child, death, notices
            )
            if not restarted and self._crash_record.resolve(helped=False):
                death = EngineDied(death.message, hint=_SAFE_MODE_FAILED, **death.details)
            if not restarted:
                # Hold the lock: a new request must go to the next child.
                self._fail_all(self._load_error or death)
        # Release the lock first, because the receiver may call the engine.
        for sentence in notices:
            self._notify(sentence)

    def _restart_in_safe_mode(
        self, child: ChildProcess, death: EngineDied, notices: list[str]
    ) -> bool:
        """Restart a build that crashed natively before its first answer, unless in safe mode."""
        fault = death.details.get("status") == FAULT_STATUS
        crashed = fault or death.details.get("signal") in _CRASHES
        if child.phase not in ("load", "warmup") or not crashed or not child.build:
            return False
        if child.build in self._crash_record.known():
            return False
        library = "llama.cpp"
        cause = death.details["signal"]
        if not child.build.startswith(library):
            library = "the backend"
            if fault:
                cause = "an error of the GPU"
        notices.append(
            f"{library} crashed before its first answer ({cause}) and restarts in safe mode, which is "
            "remembered if it helps; `localchat doctor` explains how to get back to full speed"
        )
        self._crash_record.try_safe_mode(child.build)
        child_in_safe_mode = self._running_child()
        for id_, pending in self._requests.items():
            # Nothing was computed before the warm-up ended.
            assert not pending.begun
            child_in_safe_mode.send(protocol.Generate(id_, pending.request))
        for query in self._queries.values():
            child_in_safe_mode.send(query.frame)
        return True

    def _remember_safe_mode(self) -> None:
        """Record a build that answers in safe mode, which spares the next start the crash."""
        with self._lock:
            try:
                self._crash_record.resolve(helped=True)
                return
            except OSError as error:
                why = error
        self._notify(f"safe mode could not be saved for the next start: {why}")


def _with_seed(request: GenerateRequest, seed: int) -> GenerateRequest:
    """The request as it was accepted: sent again, it is sampled with the same seed."""
    sampling = msgspec.structs.replace(request.sampling, seed=seed)
    return msgspec.structs.replace(request, sampling=sampling)
