"""The engine pool: loads models by name, shares and unloads them.

Every method may be called from any thread. Two locks: that of `_changed` guards the tables and is never held
during a load or an unload; `_loading` admits one model at a time, so that two loads cannot count on the same
memory.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from localchat.engine.events import EngineStats
from localchat.engine.interface import Engine
from localchat.engine.options import EngineOptions
from localchat.errors import EngineBusy, EngineClosed, ModelMissing, UsageError
from localchat.pool.admission import AdmissionResult, free_memory, memory_in_use, never_fits
from localchat.pool.entry import (
    NEVER,
    RETRY_AFTER_S,
    FreeMemory,
    ModelSpec,
    ModelStatus,
    OpenEngine,
    PooledEngine,
    PoolEntry,
)

_LOOK_S = 15.0
"""Time between two looks at the free memory while an editor's engine rests; a look takes milliseconds."""
_CANCEL_POLL_S = 0.5
"""Until a lease that waits notices that it was cancelled."""
_KNOWN_NAME_S = 2.0
_MAX_KNOWN_NAMES = 256


ResolveModel = Callable[[str], ModelSpec]
"""Finds the model that a name means, and its load options. Reads the disk. Raises ModelMissing, ModelInvalid,
UsageError."""
OnUnload = Callable[[str, Engine, EngineStats | None], None]
"""Takes name, engine and last statistics of a model that is unloaded."""
CheckMemory = Callable[[EngineOptions, Iterable[PoolEntry]], AdmissionResult]
"""Decides if a model fits next to the loaded ones. Raises LocalchatError for a file that cannot be loaded."""


class Lease:
    """A reference to an engine, which stays loaded until `release`.

    The end of a `with` block releases it.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        on_release: Callable[[], None],
        on_gap: Callable[[], None] = lambda: None,
        on_keep_alive: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.name = name
        self.engine = engine
        self._on_release: Callable[[], None] | None = on_release
        self.fill_gap = on_gap
        """Call it for a request of an editor that completes code: see `editor_keep_alive_s`."""
        self.keep_alive = on_keep_alive
        """Call it for a request that names its own keep-alive, in seconds as EnginePool's `keep_alive_s`."""

    def release(self) -> None:
        """Idempotent."""
        on_release = self._on_release
        self._on_release = None
        if on_release is not None:
            on_release()

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
    """Loaded engines by model and options, with reference counts and idle timers.

    keep_alive_s: seconds that an unused engine stays loaded; 0: unload at once, NEVER: keep it.
    editor_keep_alive_s: the same for an engine that filled gaps for an editor, whose users pause for longer and
        cannot wait for a load. After `keep_alive_s` it is unloaded as soon as other programs need its memory.
    patience_s: seconds that a lease waits for memory in use by others.
    queue: requests that may wait for one engine beyond its `max_slots`.
    notify: receives messages of the engines for the user.
    """

    def __init__(
        self,
        resolve: ResolveModel,
        open_engine: OpenEngine,
        check_memory: CheckMemory,
        *,
        keep_alive_s: float = 300.0,
        editor_keep_alive_s: float = 0.0,
        patience_s: float = 30.0,
        queue: int = 128,
        notify: Callable[[str], None] = lambda text: None,
        free_memory: Callable[[], FreeMemory] = free_memory,
    ) -> None:
        self._resolve = resolve
        self._open_engine = open_engine
        self._check_memory = check_memory
        self._keep_s = keep_alive_s
        self._editor_keep_s = editor_keep_alive_s
        self._free_memory_now = free_memory
        self._patience_s = patience_s
        self._queue = queue
        self._notify = notify
        tables = threading.RLock()
        self._changed = threading.Condition(tables)
        self._idle_changed = threading.Condition(tables)
        """Wakes the sweeper. Apart from `_changed`, because it need not look after each request."""
        self._sweep_s = math.inf
        """When the sweeper looks next, in monotonic seconds."""
        self._loading = threading.Lock()
        self._entries: dict[bytes, PoolEntry] = {}
        self._closing = 0
        self._known_names: dict[str, tuple[float, bytes | None]] = {}
        """What each name meant, and when: the key of a model, or None for no model. Oldest first."""
        self._numbers = itertools.count(1)
        self._closed = False
        self._idle_thread: threading.Thread | None = None
        self.on_unload: OnUnload = lambda name, engine, stats: None
        """Called before an engine is closed, on any thread."""

    # ------------------------------------------------------------------------ leases

    def lease_if_loaded(self, name: str, user: str = "") -> Lease | None:
        """A lease without disk access or waiting; None if `lease` has to look.

        The engine must run and its name must have been resolved within the last seconds. After that, one of
        the requests that come together looks again, and the others do not wait for it. Raises EngineBusy,
        and ModelMissing for a name that meant no model within that time.
        """
        with self._changed:
            known_s, key = self._known_names.get(name, (-math.inf, None))
            now_s = time.monotonic()
            entry = self._entries.get(key) if key is not None else None
            running = entry is not None and entry.engine.alive
            if now_s - known_s > _KNOWN_NAME_S:
                if running:
                    self._known_names[name] = (now_s, key)
                return None
            if key is None:
                raise ModelMissing(f"no model {name!r}")
            if entry is not None and running:
                return self._lease_entry(entry, user)
            return None

    def lease(
        self, name: str, user: str = "", *, cancelled: threading.Event | None = None
    ) -> Lease:
        """Resolve a model name and lease its engine; see `lease_spec`. Also raises what `resolve` raises."""
        try:
            spec = self._resolve(name)
        except (ModelMissing, UsageError):
            self._remember_name(name, None)
            raise
        lease = self.lease_spec(spec, user, cancelled=cancelled)
        self._remember_name(name, spec.key)
        return lease

    def _remember_name(self, name: str, key: bytes | None) -> None:
        """Note what a name means, which saves the next requests a look at the disk."""
        with self._changed:
            self._known_names.pop(name, None)
            self._known_names[name] = (time.monotonic(), key)
            if len(self._known_names) > _MAX_KNOWN_NAMES:
                del self._known_names[next(iter(self._known_names))]

    def lease_spec(
        self, spec: ModelSpec, user: str = "", *, cancelled: threading.Event | None = None
    ) -> Lease:
        """Lease the engine of a model and load it if needed. Waits up to `patience_s` for memory in use by
        others, or until `cancelled` is set.

        Raises DoesNotFit, EngineBusy, EngineClosed, ModelInvalid, UsageError.
        """
        until_s = time.monotonic() + self._patience_s
        cancelled = cancelled or threading.Event()
        with self._changed:
            if taken := self._lease_running(spec.key, user):
                return taken
        while not self._loading.acquire(timeout=min(self._patience_s, _CANCEL_POLL_S)):
            if cancelled.is_set() or time.monotonic() >= until_s:
                raise EngineBusy(
                    f"{spec.name} has to wait: another model is loading",
                    retry_after_s=RETRY_AFTER_S,
                )
        try:
            with self._changed:
                if taken := self._lease_running(spec.key, user):
                    return taken
            verdict = self._free_memory(spec, until_s, cancelled)
            engine = self._open_engine(spec.options, self._notify)
            with self._changed:
                if not self._closed:
                    entry = PoolEntry(
                        spec, engine, verdict.needed_bytes, time.monotonic(), verdict.gpu_bytes
                    )
                    self._entries[spec.key] = entry
                    return self._lease_entry(entry, user)
            engine.close()
            raise EngineClosed("the server is stopping")
        finally:
            self._loading.release()

    def _lease_running(self, key: bytes, user: str) -> Lease | None:
        """A lease if the engine is loaded. Call with the lock held."""
        if self._closed:
            raise EngineClosed("the server is stopping")
        entry = self._entries.get(key)
        if entry is None:
            return None
        if not entry.engine.alive and not entry.users:
            # The process ended by itself: admission must be checked again before it is restarted.
            del self._entries[key]
            return None
        return self._lease_entry(entry, user)

    def _lease_entry(self, entry: PoolEntry, user: str) -> Lease:
        """Add one user to an entry. Call with the lock held."""
        waiting = len(entry.users) - entry.spec.options.load.max_slots
        if waiting >= self._queue:
            raise EngineBusy(
                f"{entry.spec.name} is busy: {waiting} requests are already waiting for it",
                hint="try again in a moment",
                waiting=waiting,
                limit=self._queue,
                retry_after_s=RETRY_AFTER_S,
            )
        number = next(self._numbers)
        entry.users[number] = user
        entry.free_at_rest = None

        def fill_gap() -> None:
            entry.fills_gaps = True

        def keep_alive(seconds: float) -> None:
            entry.keep_alive_s = seconds

        return Lease(
            entry.spec.name,
            entry.engine,
            lambda: self._release(entry, number),
            fill_gap,
            keep_alive,
        )

    def _release(self, entry: PoolEntry, number: int) -> None:
        with self._changed:
            entry.users.pop(number, None)
            if not entry.users:
                entry.idle_since_s = time.monotonic()
                self._start_idle_thread()
                if entry.idle_since_s + max(self._usual_keep_s(entry), 0) < self._sweep_s:
                    self._idle_changed.notify_all()
            self._changed.notify_all()

    # ------------------------------------------------------------------------ memory

    def _free_memory(
        self, spec: ModelSpec, until_s: float, cancelled: threading.Event
    ) -> AdmissionResult:
        """Unload idle engines, least recently used first, until the model fits.

        Then waits for one to become idle. Raises DoesNotFit if it can never fit, EngineBusy if the wait was
        in vain.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._closing, timeout=self._patience_s)
                if self._closed:
                    raise EngineClosed("the server is stopping")
                if cancelled.is_set():  # nobody is unloaded for a client that has left
                    raise EngineBusy(f"{spec.name} is no longer waited for")
                entries = list(self._entries.values())
            for entry in entries:
                entry.refresh_info()
            verdict = self._check_memory(spec.options, entries)
            if verdict.fits and not verdict.cramped:
                return verdict
            if not verdict.fits and verdict.never_fits(entries):
                raise never_fits(spec, verdict)
            if self._unload_idlest(verdict):
                continue
            if verdict.fits:
                return verdict
            with self._changed:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise memory_in_use(spec, verdict, entries)
                self._changed.wait(min(left_s, _CANCEL_POLL_S))

    def _unload_idlest(self, verdict: AdmissionResult) -> bool:
        """Unload the least recently used idle engine whose memory helps. False if there is none."""
        with self._changed:
            idle = [
                entry
                for entry in self._entries.values()
                if not entry.users and verdict.gains_from(entry)
            ]
            if not idle:
                return False
            oldest = min(idle, key=lambda entry: entry.idle_since_s)
            self._detach(oldest)
        self._close_engine(oldest)
        return True

    def _detach(self, entry: PoolEntry) -> None:
        """Remove an entry so that nobody can lease it; its memory is free after `_close_engine`. Call with
        the lock held."""
        del self._entries[entry.spec.key]
        self._closing += 1

    def _close_engine(self, entry: PoolEntry) -> None:
        try:
            self.on_unload(entry.spec.name, entry.engine, entry.stats())
            entry.engine.close()
        finally:
            with self._changed:
                self._closing -= 1
                self._changed.notify_all()

    # ------------------------------------------------------------------------ idle time

    def _start_idle_thread(self) -> None:
        """Start the sweeper once there is something to wait for. Call with the lock held."""
        timed = any(self._usual_keep_s(entry) != NEVER for entry in self._entries.values())
        if self._idle_thread is None and timed:
            self._idle_thread = threading.Thread(
                target=self._unload_idle, name="pool-sweeper", daemon=True
            )
            self._idle_thread.start()

    def _unload_idle(self) -> None:
        """Unload engines whose idle time is over, until the pool is closed. Runs on its own thread."""
        while True:
            free = self._free_memory_now() if self._has_resting() else None
            with self._changed:
                if self._closed:
                    return
                now_s = time.monotonic()
                due = [
                    entry for entry in self._entries.values() if self._is_due(entry, now_s, free)
                ]
                if not due:
                    self._sweep_s = self._next_sweep_s(now_s)
                    never = self._sweep_s == math.inf
                    self._idle_changed.wait(None if never else self._sweep_s - now_s)
                    continue
                for entry in due:
                    self._detach(entry)
            for entry in due:
                self._close_engine(entry)

    def _has_resting(self) -> bool:
        now_s = time.monotonic()
        with self._changed:
            return any(self._is_resting(entry, now_s) for entry in self._entries.values())

    def _is_resting(self, entry: PoolEntry, now_s: float) -> bool:
        """True for an editor's engine between its ordinary idle time and its longest. Call with the lock
        held."""
        ends_s = entry.expires_at_s(self._usual_keep_s(entry))
        return ends_s is not None and ends_s <= now_s < entry.idle_since_s + self._keep_for(entry)

    def _is_due(self, entry: PoolEntry, now_s: float, free: FreeMemory | None) -> bool:
        """True if the entry is to be unloaded now. `free`: None if nobody rests. Call with the lock held."""
        if not self._is_resting(entry, now_s):
            ends_s = entry.expires_at_s(self._keep_for(entry))
            return ends_s is not None and ends_s <= now_s
        if free is None:
            return False
        if entry.free_at_rest is None:
            entry.free_at_rest = free
        return entry.is_in_the_way(free)

    def _next_sweep_s(self, now_s: float) -> float:
        """When the next engine may be due, in monotonic seconds. Call with the lock held."""
        entries = list(self._entries.values())
        ends = [entry.expires_at_s(self._usual_keep_s(entry)) for entry in entries]
        looks = [end_s if end_s > now_s else now_s + _LOOK_S for end_s in ends if end_s is not None]
        return min(looks, default=math.inf)

    def _usual_keep_s(self, entry: PoolEntry) -> float:
        """Seconds that this entry stays loaded without users, whether an editor uses it or not."""
        if entry.keep_alive_s is None:
            return self._keep_s
        return entry.keep_alive_s

    def _keep_for(self, entry: PoolEntry) -> float:
        """Seconds that this entry stays loaded without users."""
        usual_s = self._usual_keep_s(entry)
        if usual_s < 0 or not entry.fills_gaps or entry.keep_alive_s is not None:
            return usual_s
        return max(usual_s, self._editor_keep_s)

    # ------------------------------------------------------------------------ status and unload

    def loaded(self) -> list[ModelStatus]:
        """Status of every loaded model, in load order."""
        with self._changed:
            entries = list(self._entries.values())
        return [self._status(entry) for entry in entries]

    def engines(self) -> list[tuple[str, PooledEngine]]:
        """Running engines with their model names."""
        with self._changed:
            return [
                (entry.spec.name, entry.engine)
                for entry in self._entries.values()
                if entry.engine.alive
            ]

    def _status(self, entry: PoolEntry) -> ModelStatus:
        stats = entry.stats()
        with self._changed:
            return entry.status(stats, time.monotonic(), self._keep_for(entry))

    def unload(self, name: str) -> int | None:
        """Unload a model at once; its requests end with EngineClosed. Returns how many there were, or None if
        the model is not loaded. `name`: the model's name, or anything that resolves to it."""
        with self._changed:
            found = [one for one in self._entries.values() if one.spec.name == name]
        if not found:
            key = self._resolve(name).key
            with self._changed:
                found = [one for one in self._entries.values() if one.spec.key == key]
        ended = 0
        for entry in found:
            with self._changed:
                if self._entries.get(entry.spec.key) is not entry:
                    continue
                ended += len(entry.users)
                self._detach(entry)
            self._close_engine(entry)
        return ended if found else None

    def close(self) -> None:
        """Unload every model; active leases end with EngineClosed. Idempotent."""
        with self._changed:
            self._closed = True
            entries = list(self._entries.values())
            for entry in entries:
                self._detach(entry)
            self._changed.notify_all()
            self._idle_changed.notify_all()
        for entry in entries:
            self._close_engine(entry)
