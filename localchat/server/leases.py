"""The pool as the server asks it: without ever blocking the event loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, TypeVar

from localchat.engine.interface import Engine, EngineInfo
from localchat.errors import LocalchatError, ModelMissing
from localchat.pool.entry import ModelSpec
from localchat.pool.pool import EnginePool
from localchat.pool.pool import Lease as PoolLease
from localchat.pool.resolver import ModelResolver

# What the server asks of whoever owns the loaded models (the pool), and the smallest owner: one engine.
#
# The Protocols stand here, with their caller; the pool implements them without inheriting.


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that can be asked for by `name`. `context_tokens`: of the loaded engine, what it would be
    given otherwise, 0 where that is not known yet; `context_train`, `parameters`, `size_bytes`: 0 where
    unknown. `created`: seconds of the Unix clock (the file's date, or the load). `abilities`: of chat, tools,
    thinking, infill."""

    name: str
    loaded: bool
    context_tokens: int = 0
    context_train: int = 0
    created: int = 0
    architecture: str = ""
    quantization: str = ""
    parameters: int = 0
    size_bytes: int = 0
    abilities: frozenset[str] = frozenset()


class Lease(Protocol):
    """The right to use an engine. `async with` holds the engine; the end of the block gives it back, and
    only then may it be unloaded. Leaving by an exception or a cancelled task gives it back too."""

    engine: Engine
    name: str
    """What the model is called here, which may differ from the word that was asked for."""
    info: EngineInfo

    async def __aenter__(self) -> "Lease": ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Engines(Protocol):
    """Everything that can answer. Called from the event loop of the server; nothing here may block it:
    what takes time (a load, a question to the child) runs in a thread."""

    async def lease(self, model_word: str, *, user: str = "") -> Lease:
        """The engine of a model, started where it is not running. Returns as soon as a request can be handed
        to the engine (the vocabulary is read; the weights may follow while it streams `Loading`). The word
        is a name of the library, never a path; empty: the server's own model. `user`: who asks, for `ps`.
        Cancelling the call takes back the wish. Raises ModelMissing, ModelInvalid, DoesNotFit, EngineDied."""
        ...

    def models(self) -> list[ModelCard]:
        """Every model that can be asked for, the server's own first."""
        ...

    def loaded(self) -> list[tuple[str, Engine]]:
        """The engines that run now, by name; their `stats()` are read for `/metrics`."""
        ...


@dataclass(slots=True)
class _OneLease:
    engine: Engine
    name: str
    info: EngineInfo

    async def __aenter__(self) -> "_OneLease":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


@dataclass(slots=True)
class OneEngine:
    """An Engines of one engine, which somebody else closes."""

    engine: Engine
    name: str
    created: int = field(default_factory=lambda: int(time.time()))
    _info: EngineInfo | None = None

    async def lease(self, model_word: str, *, user: str = "") -> Lease:
        if model_word not in ("", self.name):
            raise ModelMissing(
                f"there is no model {model_word!r} here", hint=f"this server has {self.name}"
            )
        self._info = await asyncio.to_thread(self.engine.info)
        return _OneLease(self.engine, self.name, self._info)

    def models(self) -> list[ModelCard]:
        info = self._info
        if info is None:
            return [ModelCard(self.name, loaded=True, created=self.created)]
        return [
            ModelCard(
                self.name,
                loaded=True,
                context_tokens=info.context_tokens,
                context_train=info.context_train,
                created=self.created,
                architecture=info.architecture,
                quantization=info.quantization,
                parameters=info.parameters,
                size_bytes=info.file_bytes,
            )
        ]

    def loaded(self) -> list[tuple[str, Engine]]:
        return [(self.name, self.engine)]


R = TypeVar("R")
_THREADS = 32
"""As many requests may wait for a model to be loaded; the event loop's own threads stay free."""


class PooledLease:
    """See engines.Lease."""

    def __init__(self, lease: PoolLease, info: EngineInfo) -> None:
        self._lease = lease
        self.engine: Engine = lease.engine
        self.name = lease.name
        self.info = info

    async def __aenter__(self) -> "PooledLease":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lease.release()


class PooledEngines:
    """See engines.Engines."""

    def __init__(self, pool: EnginePool, finder: ModelResolver) -> None:
        self.pool = pool
        self.finder = finder
        self._threads = ThreadPoolExecutor(_THREADS, "leases")
        self._infos: dict[int, EngineInfo] = {}
        self._last: dict[str, EngineInfo] = {}
        """What each model last said of itself, by name, also after it was unloaded."""
        self._looking: asyncio.Task[None] | None = None

    async def lease(self, model_word: str, *, user: str = "") -> Lease:
        ready = self.pool.lease_if_loaded(model_word, user)
        if ready is not None and (info := self._infos.get(id(ready.engine))) is not None:
            return PooledLease(ready, info)
        if ready is not None:
            ready.release()
        return await self._leased(lambda gone: self.pool.lease(model_word, user, given_up=gone))

    async def lease_spec(self, wanted: Callable[[], ModelSpec], user: str) -> Lease:
        """The same for a model that was found otherwise; `wanted` is called in a thread."""
        return await self._leased(lambda gone: self.pool.lease_spec(wanted(), user, given_up=gone))

    async def _leased(self, take: Callable[[threading.Event], PoolLease]) -> PooledLease:
        """Take a lease in a thread and wait for the vocabulary. A caller that is cancelled meanwhile leaves
        no lease behind."""
        given_up = threading.Event()

        def taken() -> PooledLease:
            lease = take(given_up)
            try:
                return PooledLease(lease, lease.engine.info())
            except BaseException:
                lease.release()
                raise

        asking = asyncio.ensure_future(self.in_thread(taken))
        try:
            found = await asyncio.shield(asking)
        except asyncio.CancelledError:
            given_up.set()
            asking.add_done_callback(_give_back)
            raise
        self._last[found.name] = found.info
        if found.info.loaded:
            self._remember(found)
        return found

    def _remember(self, lease: PooledLease) -> None:
        """What a loaded engine says of itself does not change any more."""
        here = {id(engine) for _, engine in self.pool.engines()}
        self._infos = {key: info for key, info in self._infos.items() if key in here}
        self._infos[id(lease.engine)] = lease.info

    async def in_thread(self, work: Callable[[], R]) -> R:
        """Run what takes time beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def models(self) -> list[ModelCard]:
        if self.finder.stale and (self._looking is None or self._looking.done()):
            self._looking = asyncio.ensure_future(self.look())
        loaded = {name for name, _ in self.pool.engines()}
        return [
            ModelCard(
                known.name,
                loaded=known.name in loaded,
                context_tokens=info.context_tokens if (info := self._last.get(known.name)) else 0,
                context_train=info.context_train if info else known.context_train,
                created=known.created,
                architecture=known.architecture,
                quantization=known.quantization,
                parameters=known.parameters,
                size_bytes=known.size_bytes,
                abilities=known.abilities,
            )
            for known in self.finder.models()
        ]

    async def look(self) -> None:
        """Read the library anew, for `models`. What cannot be read leaves the list as it was."""
        try:
            await self.in_thread(self.finder.look)
        except (LocalchatError, OSError):
            return

    def close(self) -> None:
        """Unload everything."""
        self.pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def loaded(self) -> list[tuple[str, Engine]]:
        return list(self.pool.engines())


def _give_back(asking: "asyncio.Future[PooledLease]") -> None:
    if not asking.cancelled() and asking.exception() is None:
        asking.result()._lease.release()
