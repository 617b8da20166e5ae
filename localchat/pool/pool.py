"""The engine pool: loads models by name, shares them between requests, and unloads them.

All methods may be called from any thread. The lock of `_changed` guards the tables, and no load or unload
happens under it. The lock `_loading` admits one load at a time, so that two loads cannot count on the same
memory.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from localchat.engine.events import EngineStats
from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.options import EngineOptions
from localchat.errors import EngineBusy, EngineClosed, ModelMissing, UsageError
from localchat.pool.admission import AdmissionResult, memory_in_use, never_fits
from localchat.pool.entry import (
    NEVER,
    RETRY_AFTER_S,
    ModelSpec,
    ModelStatus,
    OpenEngine,
    PooledEngine,
    PoolEntry,
)
from localchat.sanitize import sanitize_line

_CANCEL_POLL_S = 0.5
"""Time until a waiting lease notices that it was cancelled."""
_CACHED_NAME_S = 2.0
_MAX_CACHED_NAMES = 256


ResolveModel = Callable[[str], ModelSpec]
"""Resolves a name. Reads the disk. Raises ModelMissing, ModelInvalid, UsageError."""
OnUnload = Callable[[str, Engine, EngineStats | None], None]
"""Receives name, engine and last statistics of a model that is unloaded."""
CheckMemory = Callable[[EngineOptions, Iterable[PoolEntry]], AdmissionResult]
"""Decides if a model fits next to the loaded ones. Raises LocalchatError for a file that cannot be loaded."""


class Lease:
    """A reference to an engine. Released by `release` or the end of a `with` block."""

    def __init__(self, entry: PoolEntry, on_release: Callable[[], None]) -> None:
        self.name = entry.spec.name
        self.engine: Engine = entry.engine
        self._entry = entry
        self._on_release: Callable[[], None] | None = on_release

    @property
    def final_info(self) -> EngineInfo | None:
        """Info of the engine, None before its model is loaded. It does not change after that."""
        info = self._entry.info
        if info is None or not info.loaded:
            return None
        return info

    def info(self) -> EngineInfo:
        """Return the info of the engine. Waits for the vocabulary. Raises LocalchatError."""
        info = self.final_info or self.engine.info()
        self._entry.info = info
        return info

    def fill_gap(self) -> None:
        """Note that an editor completes code with the engine; see `editor_keep_alive_s`."""
        self._entry.fills_gaps = True

    def keep_alive(self, seconds: float) -> None:
        """Set the model's own keep-alive; see EnginePool's `keep_alive_s`."""
        self._entry.keep_alive_s = seconds

    def release(self) -> None:
        """Idempotent."""
        on_release = self._on_release
        self._on_release = None
        if on_release is not None:
            on_release()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class EnginePool:
    """Loaded engines by model and options, with reference counts and idle timers.

    keep_alive_s: seconds that an unused engine stays loaded. 0 unloads it at once, NEVER keeps it.
    editor_keep_alive_s: the same for an engine that filled gaps for an editor, whose users pause longer and
        cannot wait for a load.
    patience_s: seconds that a lease waits for memory in use by others.
    queue: requests that may wait for an engine in addition to its `max_slots`.
    notify: receives the engines' notices for the user.
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
    ) -> None:
        self._resolve = resolve
        self._open_engine = open_engine
        self._check_memory = check_memory
        self._keep_s = keep_alive_s
        self._editor_keep_s = editor_keep_alive_s
        self._patience_s = patience_s
        self._queue = queue
        self._notify = notify
        tables = threading.RLock()
        self._changed = threading.Condition(tables)
        self._idle_changed = threading.Condition(tables)
        """Wakes the sweeper, which ignores most changes."""
        self._sweep_s = math.inf
        """Monotonic time of the sweeper's next run."""
        self._loading = threading.Lock()
        self._entries: dict[bytes, PoolEntry] = {}
        self._closing = 0
        self._cached_names: dict[str, tuple[float, bytes | None]] = {}
        """Monotonic time and result of each lookup of a name: a model's key, or None. Oldest first."""
        self._numbers = itertools.count(1)
        self._closed = False
        self._idle_thread: threading.Thread | None = None
        self.on_unload: OnUnload = lambda name, engine, stats: None
        """Called before an engine is closed, on any thread."""

    def lease_if_loaded(self, name: str, user: str = "") -> Lease | None:
        """Lease without disk access or waiting. Returns None if only `lease` can help.

        The engine must run, and the name must have been resolved within the last seconds. Afterwards one of the
        concurrent requests resolves it again, and the others do not wait for it. Raises EngineBusy, and
        ModelMissing for a name that was unknown within that time.
        """
        with self._changed:
            resolved_s, key = self._cached_names.get(name, (-math.inf, None))
            now_s = time.monotonic()
            is_fresh = now_s - resolved_s <= _CACHED_NAME_S
            if key is None:
                if is_fresh:
                    raise ModelMissing(f"no model {name!r}")
                return None
            entry = self._entries.get(key)
            if entry is None or not entry.engine.alive:
                return None
            if not is_fresh:
                self._cached_names[name] = (now_s, key)
                return None
            return self._lease_entry(entry, user)

    def lease(
        self, name: str, user: str = "", *, cancelled: threading.Event | None = None
    ) -> Lease:
        """Resolve a model name and lease its engine; see `lease_spec`. Also raises what `resolve` raises."""
        try:
            spec = self._resolve(name)
        except (ModelMissing, UsageError):
            self._cache_name(name, None)
            raise
        lease = self.lease_spec(spec, user, cancelled=cancelled)
        self._cache_name(name, spec.key)
        return lease

    def _cache_name(self, name: str, key: bytes | None) -> None:
        with self._changed:
            self._cached_names.pop(name, None)
            self._cached_names[name] = (time.monotonic(), key)
            if len(self._cached_names) > _MAX_CACHED_NAMES:
                del self._cached_names[next(iter(self._cached_names))]

    def lease_spec(
        self, spec: ModelSpec, user: str = "", *, cancelled: threading.Event | None = None
    ) -> Lease:
        """Lease the engine of a model and load it if needed.

        Waits up to `patience_s` for memory in use by others, or until `cancelled` is set. Raises DoesNotFit,
        EngineBusy, EngineClosed, ModelInvalid, UsageError.
        """
        until_s = time.monotonic() + self._patience_s
        cancelled = cancelled or threading.Event()
        with self._changed:
            if lease := self._lease_running(spec.key, user):
                return lease
        while not self._loading.acquire(timeout=min(self._patience_s, _CANCEL_POLL_S)):
            if cancelled.is_set() or time.monotonic() >= until_s:
                raise EngineBusy(
                    f"{spec.name} has to wait: another model is loading",
                    retry_after_s=RETRY_AFTER_S,
                )
        try:
            with self._changed:
                if lease := self._lease_running(spec.key, user):
                    return lease
            admission = self._free_memory(spec, until_s, cancelled)
            # Opening takes seconds. Requests for loaded models must not wait for it.
            engine = self._open_engine(spec.options, partial(self._notify_about, spec.name))
            with self._changed:
                if not self._closed:
                    entry = PoolEntry(
                        spec,
                        engine,
                        planned_bytes=admission.needed_bytes,
                        idle_since_s=time.monotonic(),
                        planned_gpu_bytes=admission.gpu_bytes,
                    )
                    self._entries[spec.key] = entry
                    return self._lease_entry(entry, user)
            engine.close()
            raise EngineClosed("the server is stopping")
        finally:
            self._loading.release()

    def _lease_running(self, key: bytes, user: str) -> Lease | None:
        """Lease the engine if it is loaded. Call with the lock held."""
        if self._closed:
            raise EngineClosed("the server is stopping")
        entry = self._entries.get(key)
        if entry is None:
            return None
        if not entry.engine.alive and not entry.users:
            # The process has exited. Check the memory again before the engine is restarted.
            del self._entries[key]
            return None
        return self._lease_entry(entry, user)

    def _lease_entry(self, entry: PoolEntry, user: str) -> Lease:
        """Add a user to an entry. Call with the lock held."""
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
        return Lease(entry, lambda: self._release(entry, number))

    def _release(self, entry: PoolEntry, number: int) -> None:
        with self._changed:
            entry.users.pop(number, None)
            if not entry.users:
                entry.idle_since_s = time.monotonic()
                self._start_idle_thread()
                if entry.idle_since_s + max(self._keep_for(entry), 0) < self._sweep_s:
                    self._idle_changed.notify_all()
            self._changed.notify_all()

    def _free_memory(
        self, spec: ModelSpec, until_s: float, cancelled: threading.Event
    ) -> AdmissionResult:
        """Unload idle engines, least recently used first, until the model fits.

        Without idle engines, wait for one. Raises DoesNotFit if the model can never fit, EngineBusy after the
        wait.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._closing, timeout=self._patience_s)
                if self._closed:
                    raise EngineClosed("the server is stopping")
                if cancelled.is_set():  # unload no engine for a client that has disconnected
                    raise EngineBusy(f"{spec.name} is no longer waited for")
                entries = list(self._entries.values())
            # Engines that have finished loading since then claim no more memory.
            for entry in entries:
                entry.refresh_info()
            admission = self._check_memory(spec.options, entries)
            if admission.fits and not admission.cramped:
                return admission
            if not admission.fits and admission.never_fits(entries):
                raise never_fits(spec, admission)
            if self._unload_idlest(admission):
                continue
            if admission.fits:
                return admission
            with self._changed:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise memory_in_use(spec, admission, entries)
                self._changed.wait(min(left_s, _CANCEL_POLL_S))

    def _unload_idlest(self, admission: AdmissionResult) -> bool:
        """Unload the least recently used idle engine whose memory helps. Returns False without one."""
        with self._changed:
            idle = [
                entry
                for entry in self._entries.values()
                if not entry.users and admission.gains_from(entry)
            ]
            if not idle:
                return False
            oldest = min(idle, key=lambda entry: entry.idle_since_s)
            self._detach(oldest)
        self._close_engine(oldest)
        return True

    def _detach(self, entry: PoolEntry) -> None:
        """Remove an entry, so that it cannot be leased. `_close_engine` frees its memory. Call with the lock
        held."""
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

    def _start_idle_thread(self) -> None:
        """Start the sweeper if an engine can become due. Call with the lock held."""
        timed = any(self._keep_for(entry) != NEVER for entry in self._entries.values())
        if self._idle_thread is None and timed:
            self._idle_thread = threading.Thread(
                target=self._unload_idle, name="pool-sweeper", daemon=True
            )
            self._idle_thread.start()

    def _unload_idle(self) -> None:
        """Unload engines whose idle time is over, until the pool is closed. Runs on a thread of its own."""
        while True:
            with self._changed:
                if self._closed:
                    return
                now_s = time.monotonic()
                ends = [(self._expires_at_s(entry), entry) for entry in self._entries.values()]
                due = [entry for end_s, entry in ends if end_s <= now_s]
                if not due:
                    self._sweep_s = min((end_s for end_s, _ in ends), default=math.inf)
                    wait_s = self._sweep_s - now_s
                    self._idle_changed.wait(wait_s if wait_s < math.inf else None)
                    continue
                for entry in due:
                    self._detach(entry)
            for entry in due:
                self._close_engine(entry)

    def _keep_for(self, entry: PoolEntry) -> float:
        """Return the seconds that an entry stays loaded without users."""
        if entry.keep_alive_s is not None:
            return entry.keep_alive_s
        if entry.fills_gaps and self._keep_s >= 0:
            return max(self._keep_s, self._editor_keep_s)
        return self._keep_s

    def _expires_at_s(self, entry: PoolEntry) -> float:
        """Return the monotonic time at which an entry is unloaded, or infinity. Call with the lock held."""
        end_s = entry.expires_at_s(self._keep_for(entry))
        return math.inf if end_s is None else end_s

    def loaded(self) -> list[ModelStatus]:
        """Return the status of every loaded model, in load order."""
        with self._changed:
            entries = list(self._entries.values())
        return [self._status(entry) for entry in entries]

    def engines(self) -> list[tuple[str, PooledEngine]]:
        """Return the running engines with their model names."""
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

    def _notify_about(self, name: str, text: str) -> None:
        """Report a notice of one of several engines."""
        self._notify(f"{sanitize_line(name)}: {text}")

    def unload(self, name: str) -> int | None:
        """Unload a model at once, and end its requests with EngineClosed.

        Returns the number of requests, or None if no such model is loaded. `name`: the model's name, or
        anything that resolves to it.
        """
        with self._changed:
            entries = [entry for entry in self._entries.values() if entry.spec.name == name]
        if not entries:
            try:
                key = self._resolve(name).key
            except (ModelMissing, UsageError):
                return None  # it may have been removed since, or never existed
            with self._changed:
                entries = [entry for entry in self._entries.values() if entry.spec.key == key]
        if not entries:
            return None
        ended = 0
        for entry in entries:
            with self._changed:
                if self._entries.get(entry.spec.key) is not entry:
                    continue
                ended += len(entry.users)
                self._detach(entry)
            self._close_engine(entry)
        return ended

    def close(self) -> None:
        """Unload every model. Active leases end with EngineClosed. Idempotent."""
        with self._changed:
            self._closed = True
            entries = list(self._entries.values())
            for entry in entries:
                self._detach(entry)
            self._changed.notify_all()
            self._idle_changed.notify_all()
        for entry in entries:
            self._close_engine(entry)
