"""LocalEngine: a model in a child process of our own."""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from localchat.engine.events import (
    Accepted,
    Done,
    EngineStats,
    Event,
    Loading,
    MetricsSnapshot,
    Queued,
)
from localchat.engine.interface import EngineInfo, Vectors
from localchat.engine.local import protocol
from localchat.engine.local.crash_record import CrashRecord
from localchat.engine.local.process import ChildProcess
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.stream import SIGNAL_POLL_S, Stream
from localchat.errors import EngineClosed, EngineDied, LocalchatError, UsageError, from_wire

R = TypeVar("R", bound=msgspec.Struct)

_BEFORE_WORK = (Loading, Queued, MetricsSnapshot)
_NOT_THE_BUILD = (
    "safe mode did not help: the file may be damaged, or this llama.cpp has a fault with such models; "
    "download it again, or try `pip install --upgrade llama-cpp-python`"
)
_CRASHES = frozenset({"SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT"})


class _Query:
    """A question to the child that waits for its answer."""

    def __init__(self, frame: msgspec.Struct) -> None:
        self.frame = frame
        self._done = threading.Event()
        self._answer: msgspec.Struct | LocalchatError | None = None

    def answer(self, answer: msgspec.Struct | LocalchatError) -> None:
        self._answer = answer
        self._done.set()

    def wait(self, kind: type[R]) -> R:
        while not self._done.wait(SIGNAL_POLL_S):
            pass
        if isinstance(self._answer, LocalchatError):
            raise self._answer
        assert isinstance(self._answer, kind)
        return self._answer


@dataclass(slots=True)
class _Asked:
    """A request under way. `begun`: it has been told more than Accepted, so it cannot be asked again."""

    request: GenerateRequest
    stream: Stream
    accepted: bool = False
    begun: bool = False

    def hears(self, event: Event) -> bool:
        """Note how far the request has come; False for what was told already."""
        if isinstance(event, Accepted):
            if self.accepted:
                return False  # asked a second time, after a crash in warm-up
            self.accepted = True
            self.request = _drawn_with(self.request, event.seed)
        elif not isinstance(event, _BEFORE_WORK):
            self.begun = True
        return True


class LocalEngine:
    """See Engine. The child starts at once; after its death the next call starts another.

    `say` gets sentences for the user, from a thread of the engine. A child that dies in its load or warm-up is
    started again in safe mode once, and its build is remembered.
    """

    def __init__(self, options: EngineOptions, *, say: Callable[[str], None]) -> None:
        self._options = options
        self._say = say
        self._safe = CrashRecord(
            options.state_dir / "safe-builds.json" if options.state_dir else None
        )
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._queries: dict[int, _Query] = {}
        self._broken: LocalchatError | None = None
        self._closed = False
        self._child: ChildProcess | None = None
        with self._lock:
            self._running()

    # ------------------------------------------------------------------------ Engine

    def generate(self, request: GenerateRequest) -> Stream:
        id_ = next(self._ids)
        stream = Stream(lambda: self._cancel(id_))
        with self._lock:
            try:
                child = self._running()
            except LocalchatError as error:
                stream.put(error)
                return stream
            self._asked[id_] = _Asked(request, stream)
        # Not under the lock: the reader of answers needs it, and a long prompt waits for the child to read.
        try:
            child.send(protocol.Generate(id_, request))
        except UsageError as error:
            self._failed(id_, error)
        return stream

    def embed(self, texts: Sequence[str]) -> Vectors:
        answer = self._query(lambda id_: protocol.Embed(id_, tuple(texts)), protocol.VectorsReply)
        return Vectors(answer.vectors, answer.tokens)

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        answer = self._query(
            lambda id_: protocol.Tokenize(id_, text, special), protocol.TokensReply
        )
        return list(answer.tokens)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._query(
            lambda id_: protocol.Detokenize(id_, tuple(tokens)), protocol.TextReply
        ).text

    def render(self, messages: Messages) -> str:
        return self._query(lambda id_: protocol.Render(id_, messages), protocol.TextReply).text

    def info(self) -> EngineInfo:
        return self._query(protocol.GetInfo, protocol.InfoReply).info

    def stats(self) -> EngineStats:
        return self._query(protocol.GetStats, protocol.StatsReply).stats

    def close(self, deadline_s: float = 2.0) -> None:
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.send(protocol.Close())
            child.end(deadline_s)
        self._fail_all(EngineClosed("the engine was closed"))

    @property
    def alive(self) -> bool:
        """Whether a child runs; without one the next call starts another."""
        return self.child_pid is not None

    @property
    def child_pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        child = self._child
        return child.pid if child is not None and child.alive() else None

    # ------------------------------------------------------------------------ the child

    def _running(self) -> ChildProcess:
        """The child, started if there is none. Call with the lock held."""
        if self._closed:
            raise EngineClosed("the engine was closed")
        if self._child is None:
            self._broken = None
            self._child = ChildProcess(self._receive, self._gone)
            options = self._options
            self._child.send(
                protocol.Open(
                    model=os.fsencode(options.model),
                    name=protocol.sendable(options.name or options.model.stem),
                    backend=options.backend,
                    load=options.load,
                    speculation=options.speculation,
                    safe_builds=self._safe.known(),
                    sampling=options.sampling,
                    audit=options.audit,
                )
            )
        return self._child

    def _query(self, make: Callable[[int], msgspec.Struct], kind: type[R]) -> R:
        id_ = next(self._ids)
        query = _Query(make(id_))
        with self._lock:
            child = self._running()
            self._queries[id_] = query
        try:
            child.send(query.frame)
        except UsageError as error:
            self._failed(id_, error)
        return query.wait(kind)

    def _cancel(self, id_: int) -> None:
        with self._lock:
            child = self._child if self._asked.pop(id_, None) is not None else None
        if child is not None:
            child.send(protocol.Cancel(id_))

    def _receive(self, frame: protocol.FromChild) -> None:
        match frame:
            case protocol.Events(items):
                self._tell(items)
            case protocol.Failed(id_, code, message, hint, details):
                self._failed(id_, from_wire(code, message, hint, details))
            case protocol.Notice(text):
                self._say(text)
            case protocol.Entered(phase):
                if phase == "serve":
                    self._remember_safe_mode()
            case _:
                with self._lock:
                    query = self._queries.pop(frame.id, None)
                if query is not None:
                    query.answer(frame)

    def _tell(self, items: Sequence[tuple[int, Event]]) -> None:
        """Hand the events of a frame on, those of a request together: its reader is woken once."""
        told: dict[int, list[Event]] = {}
        for id_, event in items:
            told.setdefault(id_, []).append(event)
        with self._lock:
            for id_, events in told.items():
                asked = self._asked.get(id_)
                if asked is not None:  # else it was cancelled meanwhile
                    asked.stream.put(*[event for event in events if asked.hears(event)])
                    # A stream that is being closed asks for its cancel itself.
                    if isinstance(events[-1], Done):
                        del self._asked[id_]

    def _failed(self, id_: int, error: LocalchatError) -> None:
        if id_ == 0:
            with self._lock:
                self._broken = error
            self._fail_all(error)
            return
        with self._lock:
            asked = self._asked.pop(id_, None)
            query = self._queries.pop(id_, None)
        if asked is not None:
            asked.stream.put(error)
        if query is not None:
            query.answer(error)

    def _fail_all(self, error: LocalchatError) -> None:
        with self._lock:
            asked, self._asked = self._asked, {}
            queries, self._queries = self._queries, {}
        for one in asked.values():
            one.stream.put(error)
        for query in queries.values():
            query.answer(error)

    # ------------------------------------------------------------------------ death

    def _gone(self, child: ChildProcess) -> None:
        """The child has ended; called from its reader thread."""
        death = child.death()
        said: list[str] = []
        with self._lock:
            if self._child is not child:
                return  # closed on purpose
            self._child = None
            survived = self._broken is None and self._survives(child, death, said)
            if not survived and self._safe.settle(helped=False):
                death = EngineDied(death.message, hint=_NOT_THE_BUILD, **death.details)
            error = self._broken or death
        if not survived:
            self._fail_all(error)
        for sentence in said:  # not under the lock: who listens may hold the engine
            self._say(sentence)

    def _survives(self, child: ChildProcess, death: EngineDied, said: list[str]) -> bool:
        """Start again in safe mode, where a build crashed natively before it answered and was not in it yet."""
        crashed = death.details.get("signal") in _CRASHES
        if child.phase not in ("load", "warmup") or not crashed or not child.build:
            return False
        if child.build in self._safe.known():
            return False
        said.append(
            f"llama.cpp crashed before its first answer ({death.details['signal']}): starting again in safe "
            "mode, which is remembered if it helps; `localchat doctor` tells how to rebuild it for full speed"
        )
        self._safe.try_out(child.build)
        fresh = self._running()
        for id_, asked in self._asked.items():
            # Nothing was computed before the warm-up ended.
            assert not asked.begun
            fresh.send(protocol.Generate(id_, asked.request))
        for query in self._queries.values():
            fresh.send(query.frame)
        return True

    def _remember_safe_mode(self) -> None:
        """A child answers: if it is one in safe mode after a crash, the next start spares itself the crash."""
        with self._lock:
            try:
                self._safe.settle(helped=True)
                return
            except OSError as error:
                why = error
        self._say(f"safe mode cannot be remembered for the next start: {why}")


def _drawn_with(request: GenerateRequest, seed: int) -> GenerateRequest:
    """The request as it was accepted: asked again, it is drawn with the seed that was told."""
    exact = request.exact if request.exact is not None else request.sampling.seed is not None
    sampling = msgspec.structs.replace(request.sampling, seed=seed)
    return msgspec.structs.replace(request, sampling=sampling, exact=exact)
