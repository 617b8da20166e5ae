"""Pool entries: a loaded engine with its users, idle time and memory."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
from msgspec.structs import replace

from localchat.engine.events import EngineStats
from localchat.engine.interface import Engine, EngineInfo, GpuPart
from localchat.engine.options import EngineOptions
from localchat.errors import LocalchatError

NEVER = -1.0
"""`keep_alive_s` that never unloads an idle engine."""
RETRY_AFTER_S = 5
"""Seconds after which clients of a busy engine should try again."""


class ModelStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """Status of a loaded model, as `ps` shows it."""

    name: str
    path: str
    state: Literal["loading", "ready", "ended"]
    """`ended`: the process has exited, and the next request restarts it."""
    lora: tuple[str, ...] = ()
    """LoRA adapters of the load."""
    context_tokens: int = 0
    memory_bytes: int = 0
    """Weights, KV cache and buffers: measured by the engine, or else planned."""
    kv_bytes: int = 0
    """Part of `memory_bytes`. 0 if unknown."""
    gpu_parts: tuple[GpuPart, ...] = ()
    """Planned part of each GPU. Empty with fewer than two GPUs."""
    process_bytes: int = 0
    """Resident memory of the engine process, with pages of the model file that the system can drop."""
    clients: tuple[str, ...] = ()
    """Client of each request."""
    running: int = 0
    waiting: int = 0
    idle_s: float = 0.0
    """Seconds since the last client left."""
    unloads_in_s: float | None = None
    """Seconds until the model is unloaded. None if it is in use, or is never unloaded."""


class ServerStatus(msgspec.Struct, frozen=True):
    """Version and loaded models of a running server."""

    version: str
    models: tuple[ModelStatus, ...]


class PooledEngine(Engine, Protocol):
    """An Engine with the state of its process, which the pool needs."""

    @property
    def alive(self) -> bool:
        """True if the engine process runs. Otherwise the next call starts it."""
        ...

    @property
    def child_pid(self) -> int | None:
        """Process id of the engine, None without a process."""
        ...


OpenEngine = Callable[[EngineOptions, Callable[[str], None]], PooledEngine]


class ModelSpec(msgspec.Struct, frozen=True):
    """Name and load options of a requested model."""

    name: str
    options: EngineOptions

    @property
    def key(self) -> bytes:
        """Encoded options. Requests for the same file with the same options share one engine."""
        options = self.options
        file = os.fsencode(options.model.resolve())
        sampling = sorted(options.sampling.items())
        parts = (file, options.backend, options.load, options.speculation, sampling, options.remote)
        return msgspec.msgpack.encode(parts)


@dataclass(slots=True, eq=False)
class PoolEntry:
    """A loaded engine and its users."""

    spec: ModelSpec
    engine: PooledEngine
    planned_bytes: int
    """Memory that the planner expected for the load."""
    idle_since_s: float
    """Monotonic seconds; meaningful only without users."""
    planned_gpu_bytes: int = 0
    """Part of `planned_bytes` on the GPU."""
    users: dict[int, str] = field(default_factory=dict)
    """Client names by lease number."""
    fills_gaps: bool = False
    """True if an editor completes code with the engine; see EnginePool's `editor_keep_alive_s`."""
    keep_alive_s: float | None = None
    """`keep_alive_s` that the last client set. None means the EnginePool's."""
    info: EngineInfo | None = None
    """Info of the engine. Another thread may replace it at any time, so read it once."""

    def refresh_info(self) -> None:
        """Query the engine's info until the model is loaded. Waits for the vocabulary."""
        if not self.engine.alive or self._is_loaded:
            return
        try:
            self.info = self.engine.info()
        except LocalchatError:
            # The load failed, or the engine exited. The lease that loads it raises the reason.
            self.info = None

    def stats(self) -> EngineStats | None:
        """Return the statistics of the engine, None if it does not run."""
        self.refresh_info()
        if not self.engine.alive:
            return None
        try:
            return self.engine.stats()
        except LocalchatError:
            return None  # the engine exited between the two calls

    @property
    def _is_loaded(self) -> bool:
        info = self.info
        return info is not None and info.loaded

    @property
    def memory_bytes(self) -> int:
        """Memory of the engine: measured, else predicted, else planned."""
        if not self.engine.alive:
            return 0
        info = self.info
        if info is None:
            return self.planned_bytes
        if info.loaded and info.actual_bytes:
            return info.actual_bytes
        return info.predicted_bytes or self.planned_bytes

    @property
    def _kv_bytes(self) -> int:
        """Part of `memory_bytes` for the KV cache. 0 if unknown."""
        if not self.engine.alive or (info := self.info) is None:
            return 0
        parts = info.actual or info.predicted
        if parts is None:
            return 0
        return max(parts.kv_bytes, 0)

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

        This is weights mapped from a file, and everything that an unfinished load will claim.
        """
        if not self._is_loaded:
            return self.ram_bytes
        pid = self.engine.child_pid
        if not pid:
            return 0
        import psutil  # takes 5 ms, which a single prompt does not need

        try:
            return int(getattr(psutil.Process(pid).memory_info(), "shared", 0))
        except psutil.Error:
            return 0  # the process has exited

    def client_names(self) -> str:
        """Return the names of the clients, for a message."""
        return ", ".join(sorted({user or "somebody" for user in self.users.values()})) or "nobody"

    def status(self, stats: EngineStats | None, now_s: float, keep_s: float) -> ModelStatus:
        """Return the status for `ps`."""
        info = self.info
        status = ModelStatus(
            name=self.spec.name,
            path=str(self.spec.options.model),
            state="ended",
            lora=tuple(adapter.label for adapter in self.spec.options.load.lora),
            memory_bytes=self.memory_bytes,
            kv_bytes=self._kv_bytes,
            clients=tuple(self.users.values()),
            idle_s=0.0 if self.users else now_s - self.idle_since_s,
        )
        if info is not None:
            status = replace(status, context_tokens=info.context_tokens, gpu_parts=info.gpu_parts)
        expires_s = self.expires_at_s(keep_s)
        if expires_s is not None:
            status = replace(status, unloads_in_s=max(expires_s - now_s, 0.0))
        if stats is None:
            return status
        return replace(
            status,
            state="ready" if info is not None and info.loaded else "loading",
            process_bytes=stats.process_bytes,
            running=stats.now.running,
            waiting=stats.now.waiting,
        )

    def expires_at_s(self, keep_s: float) -> float | None:
        """Return the monotonic time at which the idle time ends, if it does."""
        if self.users or keep_s < 0:
            return None
        return self.idle_since_s + keep_s
