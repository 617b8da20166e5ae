"""Leases of engines on the event loop; blocking calls run on threads."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
"""Requests that may wait for a load at once. The event loop's default threads stay free."""


class AsyncLease:
    """A pool lease with the engine's info, for an `async with` block.

    The engine can be unloaded only after the end of the block.
    """

    def __init__(self, lease: Lease, info: EngineInfo) -> None:
        self._lease = lease
        self.info = info
        self.engine: Engine = lease.engine
        self.name: str = lease.name
        """Name of the model. The request may use another one."""

    def fill_gap(self) -> None:
        """Note that an editor completes code with this model, so that it stays loaded longer."""
        self._lease.fill_gap()

    def keep_alive(self, seconds: float) -> None:
        """Set the seconds that this model stays loaded without users; see EnginePool's `keep_alive_s`."""
        self._lease.keep_alive(seconds)

    def release(self) -> None:
        """Idempotent."""
        self._lease.release()

    async def __aenter__(self) -> "AsyncLease":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()


class AsyncEnginePool:
    """The engine pool for the server. Its methods run on the event loop and never block it."""

    def __init__(self, pool: EnginePool, resolver: ModelResolver) -> None:
        self.pool = pool
        self.resolver = resolver
        self._threads = ThreadPoolExecutor(_THREADS, "leases")
        self._last_infos: dict[str, EngineInfo] = {}
        """Info of each model at its last lease, by name. The model may be unloaded since."""
        self._refresh: asyncio.Task[None] | None = None

    async def lease(self, model: str, *, user: str = "") -> AsyncLease:
        """Lease the engine of a model and load it if needed.

        Returns once the engine accepts requests: the vocabulary is read, and the weights may follow while a
        request streams `Loading`. A cancelled call leaves no lease.

        model: a name, never a path. Empty means the server's own model. user: the client's name, for `ps`.
        Raises ModelMissing, ModelInvalid, DoesNotFit, EngineBusy, EngineDied.
        """
        lease = self.pool.lease_if_loaded(model, user)
        if lease is not None:
            info = lease.final_info
            if info is not None:
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
                return AsyncLease(lease, lease.info())
            except BaseException:
                lease.release()
                raise

        try:
            lease = await shielded(self.in_thread(work), AsyncLease.release)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        self._last_infos[lease.name] = lease.info
        return lease

    def in_thread(self, work: Callable[[], R]) -> "asyncio.Future[R]":
        """Run a blocking call on one of the lease threads."""
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def models(self) -> list[ModelCard]:
        """Return the models that a request may name, the server's own first. Refreshes an old list."""
        if self.resolver.stale and (self._refresh is None or self._refresh.done()):
            self._refresh = asyncio.ensure_future(self.refresh())
        return [self._card(card) for card in self.resolver.models()]

    def _card(self, card: ModelCard) -> ModelCard:
        info = self._last_infos.get(card.name)
        if info is None:
            return card
        return msgspec.structs.replace(
            card,
            context_tokens=info.context_tokens,
            context_train=info.context_train,
            media=info.media,
        )

    async def refresh(self) -> None:
        """Read the installed models again. On failure the list does not change."""
        try:
            await self.in_thread(self.resolver.refresh)
        except (LocalchatError, OSError):
            return

    def loaded(self) -> list[tuple[str, Engine]]:
        """Return the running engines with their model names."""
        return list(self.pool.engines())

    async def query_loaded(self, query: Callable[[Engine], R]) -> list[tuple[str, Engine, R]]:
        """Query each running engine on a thread. Returns model name, engine and result.

        An engine that exits meanwhile is left out.
        """
        results: list[tuple[str, Engine, R]] = []
        for name, engine in self.loaded():
            with suppress(LocalchatError):
                results.append((name, engine, await asyncio.to_thread(query, engine)))
        return results

    def close(self) -> None:
        """Unload every model. Later leases raise EngineClosed. Blocking and idempotent."""
        self.pool.close()
