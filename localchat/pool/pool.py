"""The pool: loads engines by name, shares them, unloads them by idle time or for want of memory.

Every method may be called from any thread. Two locks: `_changed` guards the tables and is never held over a
load or an unload; `_opening` lets one model in at a time, so that two loads do not count on the same memory.
"""

import itertools
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from localchat.engine.interface import Engine
from localchat.errors import EngineBusy, EngineClosed
from localchat.pool.admission import AdmissionResult, Room, all_used, never_fits
from localchat.pool.entry import (
    NEVER,
    RETRY_AFTER_S,
    ModelSpec,
    ModelStatus,
    OpenEngine,
    PooledEngine,
    PoolEntry,
)

_KNOWN_WORD_S = 2.0
_KNOWN_WORDS = 256


class Finder(Protocol):
    """From the word of a client to a model and the way it is loaded."""

    def find(self, word: str) -> ModelSpec:
        """Reads the disk. Raises ModelMissing, ModelInvalid, UsageError."""
        ...


class Lease:
    """The right to use an engine; it stays loaded until `release` (or the end of the `with` block)."""

    def __init__(self, name: str, engine: PooledEngine, give_back: Callable[[], None]) -> None:
        self.name = name
        self.engine: Engine = engine
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Idempotent."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class EnginePool:
    """`keep_alive_s`: how long an engine that nobody uses stays loaded; 0 not at all, NEVER for ever.
    `patience_s`: how long a lease waits for memory that others use. `queue`: requests that may wait for one
    engine beyond those that it computes at once. `say`: sentences of the engines."""

    def __init__(
        self,
        finder: Finder,
        open_engine: OpenEngine,
        room: Room,
        *,
        keep_alive_s: float = 300.0,
        patience_s: float = 30.0,
        queue: int = 128,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._finder = finder
        self._open_engine = open_engine
        self._room = room
        self._keep_s = keep_alive_s
        self._patience_s = patience_s
        self._queue = queue
        self._say = say
        self._changed = threading.Condition()
        self._opening = threading.Lock()
        self._members: dict[bytes, PoolEntry] = {}
        self._leaving = 0
        self._words: dict[str, tuple[float, bytes]] = {}
        self._numbers = itertools.count(1)
        self._closed = False
        self._sweeper: threading.Thread | None = None

    # ------------------------------------------------------------------------ leases

    def lease_if_loaded(self, word: str, user: str = "") -> Lease | None:
        """A lease of an engine that runs and was asked for by this word just now; None: `lease` must look.
        Never waits. Raises EngineBusy."""
        with self._changed:
            known_s, key = self._words.get(word, (0.0, b""))
            member = self._members.get(key)
            if member is None or time.monotonic() - known_s > _KNOWN_WORD_S:
                return None
            return self._take(member, user) if member.engine.alive else None

    def lease(self, word: str, user: str = "", *, given_up: threading.Event | None = None) -> Lease:
        """The engine of the model that a word finds; see `lease_wanted`. Raises also what the finder raises."""
        wanted = self._finder.find(word)
        lease = self.lease_spec(wanted, user, given_up=given_up)
        with self._changed:
            if len(self._words) >= _KNOWN_WORDS:
                self._words.clear()
            self._words[word] = (time.monotonic(), wanted.key)
        return lease

    def lease_spec(
        self, wanted: ModelSpec, user: str = "", *, given_up: threading.Event | None = None
    ) -> Lease:
        """The engine of a model, started where it does not run. Waits while others use the memory that it
        needs, `patience_s` at most, and no longer than until `given_up`.

        Raises DoesNotFit, EngineBusy, EngineClosed, ModelInvalid, UsageError.
        """
        until_s = time.monotonic() + self._patience_s
        with self._changed:
            if taken := self._running(wanted.key, user):
                return taken
        if not self._opening.acquire(timeout=self._patience_s):
            raise EngineBusy(
                f"{wanted.name} waits for another model to be loaded", retry_after_s=RETRY_AFTER_S
            )
        try:
            with self._changed:
                if taken := self._running(wanted.key, user):
                    return taken
            verdict = self._make_room(wanted, until_s, given_up or threading.Event())
            engine = self._open_engine(wanted.options, self._say)
            with self._changed:
                if self._closed:
                    engine.close()
                    raise EngineClosed("the server is stopping")
                member = PoolEntry(
                    wanted, engine, verdict.needed_bytes, time.monotonic(), verdict.gpu_bytes
                )
                self._members[wanted.key] = member
                self._start_sweeper()
                return self._take(member, user)
        finally:
            self._opening.release()

    def _running(self, key: bytes, user: str) -> Lease | None:
        """A lease, where the engine is there. Call with the lock held."""
        if self._closed:
            raise EngineClosed("the server is stopping")
        member = self._members.get(key)
        if member is None:
            return None
        if not member.engine.alive and not member.users:
            # It ended by itself: whether it still fits has to be judged anew.
            del self._members[key]
            return None
        return self._take(member, user)

    def _take(self, member: PoolEntry, user: str) -> Lease:
        """Count one more user. Call with the lock held."""
        waiting = len(member.users) - member.wanted.options.load.max_slots
        if waiting >= self._queue:
            raise EngineBusy(
                f"{member.wanted.name} is busy: {waiting} requests wait for it already",
                hint="try again in a moment",
                waiting=waiting,
                limit=self._queue,
                retry_after_s=RETRY_AFTER_S,
            )
        number = next(self._numbers)
        member.users[number] = user
        return Lease(member.wanted.name, member.engine, lambda: self._give_back(member, number))

    def _give_back(self, member: PoolEntry, number: int) -> None:
        with self._changed:
            member.users.pop(number, None)
            if not member.users:
                member.idle_since_s = time.monotonic()
            self._changed.notify_all()

    # ------------------------------------------------------------------------ memory

    def _make_room(
        self, wanted: ModelSpec, until_s: float, given_up: threading.Event
    ) -> AdmissionResult:
        """Unload idle engines, the least recently used first, until this model fits; then wait for one to
        become idle. Raises DoesNotFit where that cannot help, EngineBusy where it did not."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._leaving, timeout=self._patience_s)
                members = list(self._members.values())
            for member in members:
                member.look()
            verdict = self._room.judge(wanted.options, members)
            if verdict.fits and not verdict.cramped:
                return verdict
            if not verdict.fits and verdict.never(members):
                raise never_fits(wanted, verdict)
            if self._unload_idlest(verdict):
                continue
            if verdict.fits:
                return verdict
            with self._changed:
                left_s = until_s - time.monotonic()
                if left_s <= 0 or given_up.is_set():
                    raise all_used(wanted, verdict, members)
                self._changed.wait(min(left_s, 0.5))

    def _unload_idlest(self, verdict: AdmissionResult) -> bool:
        """Of those whose memory is of use. Whether there was one."""
        with self._changed:
            idle = [
                member
                for member in self._members.values()
                if not member.users and verdict.helped_by(member)
            ]
            if not idle:
                return False
            oldest = min(idle, key=lambda member: member.idle_since_s)
            self._remove(oldest)
        self._end(oldest)
        return True

    def _remove(self, member: PoolEntry) -> None:
        """Out of the table, so that nobody leases it; its memory is free after `_end`. With the lock held."""
        del self._members[member.wanted.key]
        self._leaving += 1

    def _end(self, member: PoolEntry) -> None:
        try:
            member.engine.close()
        finally:
            with self._changed:
                self._leaving -= 1
                self._changed.notify_all()

    # ------------------------------------------------------------------------ idle time

    def _start_sweeper(self) -> None:
        if self._sweeper is None and self._keep_s != NEVER:
            self._sweeper = threading.Thread(target=self._sweep, name="pool-sweeper", daemon=True)
            self._sweeper.start()

    def _sweep(self) -> None:
        """Unload what nobody used for long enough, until the pool is closed."""
        while True:
            with self._changed:
                if self._closed:
                    return
                now_s = time.monotonic()
                ends = {
                    at_s: member
                    for member in self._members.values()
                    if (at_s := member.leaves_at_s(self._keep_s)) is not None
                }
                first_s = min(ends, default=None)
                if first_s is None or first_s > now_s:
                    self._changed.wait(None if first_s is None else first_s - now_s)
                    continue
                member = ends[first_s]
                self._remove(member)
            self._end(member)

    # ------------------------------------------------------------------------ looking and stopping

    def loaded(self) -> list[ModelStatus]:
        """What is loaded now, in the order of loading."""
        with self._changed:
            members = list(self._members.values())
        return [self._described(member) for member in members]

    def engines(self) -> list[tuple[str, PooledEngine]]:
        """The engines that run, by name."""
        with self._changed:
            return [
                (member.wanted.name, member.engine)
                for member in self._members.values()
                if member.engine.alive
            ]

    def _described(self, member: PoolEntry) -> ModelStatus:
        stats = member.stats()
        with self._changed:
            return member.described(stats, time.monotonic(), self._keep_s)

    def unload(self, word: str) -> int | None:
        """Unload a model now, whoever uses it: their requests end with EngineClosed. How many there were;
        None: no such model is loaded. `word`: as the model is called, or anything that finds it."""
        with self._changed:
            found = [one for one in self._members.values() if one.wanted.name == word]
        if not found:
            key = self._finder.find(word).key
            with self._changed:
                found = [one for one in self._members.values() if one.wanted.key == key]
        ended = 0
        for member in found:
            with self._changed:
                if self._members.get(member.wanted.key) is not member:
                    continue
                ended += len(member.users)
                self._remove(member)
            self._end(member)
        return ended if found else None

    def close(self) -> None:
        """Unload everything; leases under way end with EngineClosed. Idempotent."""
        with self._changed:
            self._closed = True
            members = list(self._members.values())
            for member in members:
                self._remove(member)
            self._changed.notify_all()
        for member in members:
            self._end(member)
