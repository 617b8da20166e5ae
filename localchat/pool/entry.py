"""Pool entries: a loaded engine with its users, idle time and memory."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

from localchat.engine.events import EngineStats
from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.options import EngineOptions
from localchat.errors import LocalchatError

NEVER = -1.0
"""Value of keep_alive_s that never unloads an idle engine."""
RETRY_AFTER_S = 5
"""Retry-After for clients of a busy engine."""

_SCARCE = 0.1
"""Share of the memory; with less free, systems begin to swap."""
_TAKEN_BYTES = 256 << 20
"""What others must have taken at least: free memory goes up and down by less all the time."""


class ModelStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Status of a loaded model, as `ps` shows it."""

    name: str
    path: str
    state: Literal["loading", "ready", "ended"]
    """`ended`: its process is gone; the next request restarts it."""
    context_tokens: int = 0
    memory_bytes: int = 0
    """Weights, KV cache and buffers, as measured by the engine or else as planned."""
    process_bytes: int = 0
    """Resident memory of the engine process."""
    clients: tuple[str, ...] = ()
    """Names of its clients, one entry per request."""
    running: int = 0
    waiting: int = 0
    idle_s: float = 0.0
    """Seconds since the last client left."""
    unloads_in_s: float | None = None
    """None: never, or it is in use."""


class ServerStatus(msgspec.Struct, frozen=True):
    """Version and loaded models of a running server."""

    version: str
    models: tuple[ModelStatus, ...]


class PooledEngine(Engine, Protocol):
    """An Engine with the state of its process, which the pool needs."""

    @property
    def alive(self) -> bool:
        """True if the engine process runs; otherwise the next call starts one."""
        ...

    @property
    def child_pid(self) -> int | None:
        """Process id of the engine; None if it has no process."""
        ...


class FreeMemory(NamedTuple):
    """Free memory of the machine, for all programs."""

    ram_bytes: int
    ram_total_bytes: int
    gpu_bytes: int = 0
    gpu_total_bytes: int = 0


OpenEngine = Callable[[EngineOptions, Callable[[str], None]], PooledEngine]


class ModelSpec(msgspec.Struct, frozen=True):
    """A requested model: its name and its load options."""

    name: str
    options: EngineOptions

    @property
    def key(self) -> bytes:
        """The encoded options: requests for the same file with the same options share one engine."""
        options = self.options
        file = os.fsencode(options.model.resolve())
        sampling = sorted(options.sampling.items())
        parts: tuple[object, ...]
        parts = (file, options.backend, options.load, options.speculation, sampling, options.remote)
        if options.route is not None:
            parts += (options.route.route, os.fsencode(options.route.large.model.resolve()))
        return msgspec.msgpack.encode(parts)


@dataclass(slots=True, eq=False)
class PoolEntry:
    """A loaded engine and its users."""

    spec: ModelSpec
    engine: PooledEngine
    planned_bytes: int
    """Memory that the planner expected the load to take."""
    idle_since_s: float
    """Monotonic seconds; meaningful only without users."""
    planned_gpu_bytes: int = 0
    """Part of `planned_bytes` on the GPU."""
    users: dict[int, str] = field(default_factory=dict)
    """Client names by lease number."""
    fills_gaps: bool = False
    """An editor completes code with it: see EnginePool's `editor_keep_alive_s`."""
    keep_alive_s: float | None = None
    """Its own `keep_alive_s`, as the last client that named one wished; None: that of the EnginePool."""
    free_at_rest: FreeMemory | None = None
    """Free memory when its ordinary idle time was over; None before that."""
    info: EngineInfo | None = None
    """Another thread may replace it at any time, also by None: read it once."""

    def refresh_info(self) -> None:
        """Query the engine's info, until the model is loaded. Waits for the vocabulary."""
        if not self.engine.alive or self._is_loaded:
            return
        try:
            self.info = self.engine.info()
        except LocalchatError:
            self.info = (
                None  # it failed to load, or ended; the lease that loads it raises the reason
            )

    def stats(self) -> EngineStats | None:
        """Statistics of the engine; None if it does not run."""
        self.refresh_info()
        try:
            return self.engine.stats() if self.engine.alive else None
        except LocalchatError:
            return None  # it ended in between

    @property
    def _is_loaded(self) -> bool:
        info = self.info
        return info is not None and info.loaded

    @property
    def memory_bytes(self) -> int:
        """Memory of the engine: measured, else predicted, else planned."""
        if not self.engine.alive:
            return 0
        if (info := self.info) is None:
            return self.planned_bytes
        known = info.actual_bytes if info.loaded else 0
        return known or info.predicted_bytes or self.planned_bytes

    @property
    def gpu_bytes(self) -> int:
        """Part of `memory_bytes` on the GPU, by the planned ratio."""
        if not self.planned_bytes:
            return 0
        return self.memory_bytes * self.planned_gpu_bytes // self.planned_bytes

    @property
    def ram_bytes(self) -> int:
        """Part of `memory_bytes` in RAM."""
        return self.memory_bytes - self.gpu_bytes

    @property
    def uncounted_gpu_bytes(self) -> int:
        """GPU memory that an unfinished load will claim. The system still reports it as free."""
        return 0 if self._is_loaded else self.gpu_bytes

    @property
    def uncounted_ram_bytes(self) -> int:
        """RAM in use that the system reports as available.

        That is weights mapped from a file, and everything that an unfinished load will still claim.
        """
        if not self._is_loaded:
            return self.ram_bytes
        import psutil  # takes 5 ms, which a single prompt without a pool need not pay

        pid = self.engine.child_pid
        try:
            if pid:
                return int(getattr(psutil.Process(pid).memory_info(), "shared", 0))
            return 0
        except psutil.Error:
            return 0  # it ended in between

    def is_in_the_way(self, now: FreeMemory) -> bool:
        """True if other programs have taken memory of a kind that it holds, and little is left.

        Compared with `free_at_rest`, because a large model leaves little by itself.
        """
        before = self.free_at_rest
        if before is None:
            return False
        ram = _is_scarce(before.ram_bytes, now.ram_bytes, now.ram_total_bytes)
        gpu = _is_scarce(before.gpu_bytes, now.gpu_bytes, now.gpu_total_bytes)
        return bool((self.ram_bytes and ram) or (self.gpu_bytes and gpu))

    def client_names(self) -> str:
        """Names of its clients, for a message."""
        return ", ".join(sorted({user or "somebody" for user in self.users.values()})) or "nobody"

    def status(self, stats: EngineStats | None, now_s: float, keep_s: float) -> ModelStatus:
        """Status for `ps`."""
        leaves_s = self.expires_at_s(keep_s)
        info = self.info
        ready = info is not None and info.loaded
        return ModelStatus(
            name=self.spec.name,
            path=str(self.spec.options.model),
            state=("ready" if ready else "loading") if stats is not None else "ended",
            context_tokens=info.context_tokens if info else 0,
            memory_bytes=self.memory_bytes,
            process_bytes=stats.process_bytes if stats else 0,
            clients=tuple(self.users.values()),
            running=stats.now.running if stats else 0,
            waiting=stats.now.waiting if stats else 0,
            idle_s=0.0 if self.users else now_s - self.idle_since_s,
            unloads_in_s=None if leaves_s is None else max(leaves_s - now_s, 0.0),
        )

    def expires_at_s(self, keep_s: float) -> float | None:
        """Monotonic time of its unload for idleness; None: not scheduled."""
        if self.users or keep_s < 0:
            return None
        return self.idle_since_s + keep_s


def _is_scarce(before_bytes: int, now_bytes: int, total_bytes: int) -> bool:
    return now_bytes < _SCARCE * total_bytes and before_bytes - now_bytes > _TAKEN_BYTES
