"""An engine in the pool: who uses it, since when nobody does."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from localchat.engine.events import EngineStats
from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.options import EngineOptions
from localchat.errors import LocalchatError

NEVER = -1.0
"""As a time to keep an idle engine: for ever."""
RETRY_AFTER_S = 5
"""What a client is told to wait before it tries a busy engine again."""


class ModelStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A loaded engine as `ps` shows it. state: `loading`, `ready`, or `ended` where its process is gone (the
    next request starts it again). memory_bytes: of weights, KV and buffers, as the engine knows or planned
    them. process_bytes: resident memory of its process. clients: who holds it, each once for each request.
    idle_s: since the last of them left. unloads_in_s: None for never, or while it is used."""

    name: str
    path: str
    state: Literal["loading", "ready", "ended"]
    context_tokens: int = 0
    memory_bytes: int = 0
    process_bytes: int = 0
    clients: tuple[str, ...] = ()
    running: int = 0
    waiting: int = 0
    idle_s: float = 0.0
    unloads_in_s: float | None = None


class ServerStatus(msgspec.Struct, frozen=True):
    """What a server tells of itself: its version, and what it has loaded."""

    version: str
    models: tuple[ModelStatus, ...]


class PooledEngine(Engine, Protocol):
    """What the pool asks beyond answers."""

    @property
    def alive(self) -> bool:
        """Whether the engine's process runs; without one the next call starts another."""
        ...

    @property
    def child_pid(self) -> int | None:
        """That process; None where there is none."""
        ...


OpenEngine = Callable[[EngineOptions, Callable[[str], None]], PooledEngine]


class ModelSpec(msgspec.Struct, frozen=True):
    """A model that is asked for: what it is called, and how it is to be loaded."""

    name: str
    options: EngineOptions

    @property
    def key(self) -> bytes:
        """The encoded options: one engine serves all who want the same file in the same way."""
        options = self.options
        file = os.fsencode(options.model.resolve())
        sampling = sorted(options.sampling.items())
        parts = (file, options.backend, options.load, options.speculation, sampling, options.remote)
        return msgspec.msgpack.encode(parts)


@dataclass(slots=True, eq=False)
class PoolEntry:
    """`users`: who holds it, by the number of the lease. `planned_bytes`: what its load was said to take,
    `planned_gpu_bytes` of it in graphics memory. `idle_since_s`: monotonic seconds, of meaning while
    nobody holds it."""

    wanted: ModelSpec
    engine: PooledEngine
    planned_bytes: int
    idle_since_s: float
    planned_gpu_bytes: int = 0
    users: dict[int, str] = field(default_factory=dict)
    info: EngineInfo | None = None

    def look(self) -> None:
        """Ask what the engine says of itself, until the model is loaded. Waits for the vocabulary."""
        if not self.engine.alive or (self.info is not None and self.info.loaded):
            return
        try:
            self.info = self.engine.info()
        except LocalchatError:
            self.info = None  # it cannot be opened, or ended: who asked for it is told why

    def stats(self) -> EngineStats | None:
        """The engine's counts; None while it does not run."""
        self.look()
        try:
            return self.engine.stats() if self.engine.alive else None
        except LocalchatError:
            return None  # it ends just now

    @property
    def memory_bytes(self) -> int:
        """What the engine takes, as well as that is known."""
        if not self.engine.alive:
            return 0
        if self.info is None:
            return self.planned_bytes
        known = self.info.actual_bytes if self.info.loaded else 0
        return known or self.info.predicted_bytes or self.planned_bytes

    @property
    def gpu_bytes(self) -> int:
        """Of what the engine takes, the part in graphics memory, in proportion as it was planned."""
        if not self.planned_bytes:
            return 0
        return self.memory_bytes * self.planned_gpu_bytes // self.planned_bytes

    @property
    def ram_bytes(self) -> int:
        """The other part."""
        return self.memory_bytes - self.gpu_bytes

    @property
    def hidden_gpu_bytes(self) -> int:
        """Of graphics memory, what a load under way has not taken yet: the system calls it free."""
        return 0 if self.info is not None and self.info.loaded else self.gpu_bytes

    @property
    def hidden_ram_bytes(self) -> int:
        """What it takes although the system calls it available: weights mapped from a file, and all that a
        load under way has not taken yet."""
        if self.info is None or not self.info.loaded:
            return self.ram_bytes
        import psutil  # 5 ms, which a one-shot without a pool does not pay

        pid = self.engine.child_pid
        try:
            return int(getattr(psutil.Process(pid).memory_info(), "shared", 0)) if pid else 0
        except psutil.Error:
            return 0  # it ended meanwhile

    def client_names(self) -> str:
        """Who uses it, for a sentence."""
        return ", ".join(sorted({user or "somebody" for user in self.users.values()})) or "nobody"

    def described(self, stats: EngineStats | None, now_s: float, keep_s: float) -> ModelStatus:
        """For `ps`."""
        leaves_s, info = self.leaves_at_s(keep_s), self.info
        ready = info is not None and info.loaded
        return ModelStatus(
            name=self.wanted.name,
            path=str(self.wanted.options.model),
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

    def leaves_at_s(self, keep_s: float) -> float | None:
        """When it is unloaded for idleness; None: not now."""
        return None if self.users or keep_s < 0 else self.idle_since_s + keep_s
