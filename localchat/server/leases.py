"""Leases of engines on the event loop; blocking calls run on threads."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import msgspec

from localchat.engine.interface import Engine, EngineInfo
from localchat.errors import LocalchatError
from localchat.pool.entry import ModelSpec
from localchat.pool.pool import EnginePool, Lease
from localchat.pool.resolver import ModelCard, ModelResolver
from localchat.server.cancellation import shielded

R = TypeVar("R")
_THREADS = 32
"""So many requests may wait for a load at once; the event loop's default threads stay free."""


class AsyncLease:
    """A pool lease with the engine's info. The end of the `async with` block releases it, and only then may
    the engine be unloaded."""

    def __init__(self, lease: Lease, info: EngineInfo) -> None:
        self._lease = lease
        self.info = info
        self.engine: Engine = lease.engine
        self.name: str = lease.name
        """Name of the model, which may differ from the name in the request."""

    def fill_gap(self) -> None:
        """Note that an editor completes code with this model, which then stays loaded for longer."""
        self._lease.fill_gap()

    def keep_alive(self, seconds: float) -> None:
        """Set how long this model stays loaded without users; see EnginePool's `keep_alive_s`."""
        self._lease.keep_alive(seconds)

    def release(self) -> None:
        """Idempotent."""
        self._lease.release()

    async def __aenter__(self) -> "AsyncLease":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class AsyncEnginePool:
    """The engine pool for the server. Called from the event loop and never blocks it."""

    def __init__(self, pool: EnginePool, resolver: ModelResolver) -> None:
        self.pool = pool
        self.resolver = resolver
        self._threads = ThreadPoolExecutor(_THREADS, "leases")
        self._infos: dict[int, tuple[Engine, EngineInfo]] = {}
        """Loaded engines with their info, which does not change any more, by id of the engine."""
        self._last_infos: dict[str, EngineInfo] = {}
        """Info of each model at its last lease, by name, even if it was unloaded since."""
        self._refresh: asyncio.Task[None] | None = None

    async def lease(self, model: str, *, user: str = "") -> AsyncLease:
        """Lease the engine of a model and load it if needed.

        Returns once the engine accepts requests: the vocabulary is read, the weights may follow while a
        request streams `Loading`. A cancelled call leaves no lease.

        model: a name, never a path; empty: the server's own model. user: the client's name, for `ps`.
        Raises ModelMissing, ModelInvalid, DoesNotFit, EngineBusy, EngineDied.
        """
        lease = self.pool.lease_if_loaded(model, user)
        if lease is not None:
            if (info := self._known_info(lease.engine)) is not None:
                return AsyncLease(lease, info)
            lease.release()
        return await self._lease(
            lambda cancelled: self.pool.lease(model, user, cancelled=cancelled)
        )

    async def lease_spec(self, resolve: Callable[[], ModelSpec], user: str) -> AsyncLease:
        """Lease the engine of a spec; `resolve` runs on a thread."""
        return await self._lease(
            lambda cancelled: self.pool.lease_spec(resolve(), user, cancelled=cancelled)
        )

    async def _lease(self, take: Callable[[threading.Event], Lease]) -> AsyncLease:
        """Take a lease on a thread and wait for the vocabulary."""
        cancelled = threading.Event()

        def work() -> AsyncLease:
            lease = take(cancelled)
            try:
                return AsyncLease(lease, self._known_info(lease.engine) or lease.engine.info())
            except BaseException:
                lease.release()
                raise

        try:
            lease = await shielded(self.in_thread(work), AsyncLease.release)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        self._last_infos[lease.name] = lease.info
        if lease.info.loaded and self._known_info(lease.engine) is None:
            running = {id(engine) for _, engine in self.pool.engines()}
            self._infos = {key: known for key, known in self._infos.items() if key in running}
            self._infos[id(lease.engine)] = lease.engine, lease.info
        return lease

    def _known_info(self, engine: Engine) -> EngineInfo | None:
        """Info of an engine that has been loaded, without a question to its process."""
        known = self._infos.get(id(engine))
        return known[1] if known is not None else None

    def in_thread(self, work: Callable[[], R]) -> "asyncio.Future[R]":
        """Run a blocking call on one of the lease threads."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def models(self) -> list[ModelCard]:
        """Every model that a request may name, the server's own first. Starts a refresh if the list is old."""
        if self.resolver.stale and (self._refresh is None or self._refresh.done()):
            self._refresh = asyncio.ensure_future(self.refresh())
        loaded = {name for name, _ in self.pool.engines()}
        return [self._card(card, card.name in loaded) for card in self.resolver.models()]

    def _card(self, card: ModelCard, loaded: bool) -> ModelCard:
        info = self._last_infos.get(card.name)
        if info is None:
            return msgspec.structs.replace(card, loaded=loaded)
        return msgspec.structs.replace(
            card,
            loaded=loaded,
            context_tokens=info.context_tokens,
            context_train=info.context_train,
        )

    async def refresh(self) -> None:
        """Read the installed models again. On failure the list stays as it was."""
        try:
            await self.in_thread(self.resolver.refresh)
        except (LocalchatError, OSError):
            return

    def loaded(self) -> list[tuple[str, Engine]]:
        """Running engines with their model names."""
        return list(self.pool.engines())

    def close(self) -> None:
        """Unload every model. Every lease from now on raises EngineClosed. Blocking and idempotent."""
        self.pool.close()
