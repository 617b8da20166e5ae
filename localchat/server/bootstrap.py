"""Start of a server: builds the engine pool, registers the server, and loads the first model."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.routing import Route

from localchat.config.paths import Paths
from localchat.models.resolve import ResolvedModel
from localchat.pool.admission import check_memory
from localchat.pool.entry import OpenEngine
from localchat.pool.pool import EnginePool
from localchat.pool.resolver import ModelResolver, SettingsFor
from localchat.pool.server_registry import new_token, register
from localchat.sanitize import sanitize_line
from localchat.server.leases import AsyncEnginePool
from localchat.server.local_api import LocalApi
from localchat.server.state import Service
from localchat.server.uvicorn_server import UvicornServer

_POLL_S = 0.2
_OWNER = "start"
"""Client of the first load, as `ps` shows it."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Parameters of a server's engine pool."""

    own: ResolvedModel
    """The server's own model, which answers requests without a known model name."""
    settings_for: SettingsFor
    paths: Paths
    environ: Mapping[str, str]
    open_engine: OpenEngine
    notify: Callable[[str], None]
    """Receives notices for the user."""
    keep_alive_s: float
    """See EnginePool."""
    editor_keep_alive_s: float = 0.0
    max_slots: int = 16
    more_slots: bool = False
    """See LoadOptions."""
    queue: int = 128
    """Requests that may wait for one engine."""


class ServerContext:
    """The engine pool, the owner's token and the registration of a server."""

    def __init__(
        self, engines: AsyncEnginePool, paths: Paths, notify: Callable[[str], None]
    ) -> None:
        self.engines = engines
        self._paths = paths
        self._notify = notify
        self._token = new_token()
        self._stop: Callable[[], None] = lambda: None
        self.private: list[Route] = LocalApi(engines, self._token, lambda: self._stop()).routes()
        """Routes for the owner's programs; see `create_app`."""

    def on_stop(self, stop: Callable[[], None]) -> None:
        """Set the function that stops the server. It is called on the server's event loop."""
        self._stop = stop

    @contextmanager
    def registered(self, url: str) -> Iterator[None]:
        """Register the server during the block. `url`: address of the server on this machine.

        Without a writable state folder the server runs unregistered.
        """
        try:
            registration = register(self._paths, url, self._token, time.time())
        except OSError as problem:
            self._notify(f"your other programs will not find this server: {problem}")
            yield
            return
        try:
            yield
        finally:
            registration.withdraw()


@contextmanager
def open_server_context(spec: ServerSpec) -> Iterator[ServerContext]:
    """Build the context of a server. The end of the block unloads its engines."""
    resolver = ModelResolver(
        spec.own,
        spec.settings_for,
        spec.paths,
        spec.environ,
        max_slots=spec.max_slots,
        more_slots=spec.more_slots,
    )
    pool = EnginePool(
        resolver.resolve,
        spec.open_engine,
        check_memory,
        keep_alive_s=spec.keep_alive_s,
        editor_keep_alive_s=spec.editor_keep_alive_s,
        queue=spec.queue,
        notify=spec.notify,
    )
    engines = AsyncEnginePool(pool, resolver)
    try:
        yield ServerContext(engines, spec.paths, spec.notify)
    finally:
        engines.close()


def startup_task(
    app: Starlette,
    announce: Callable[[], None],
    notify: Callable[[str], None],
    on_stop: Callable[[Callable[[], None]], None] = lambda stop: None,
) -> Callable[[UvicornServer], Awaitable[None]]:
    """Return a task for `serve` that announces the address, then loads the server's own model.

    The server answers meanwhile, with 503 for `/health`. The task runs once signal handlers are set. A failed
    load (ModelInvalid, DoesNotFit, EngineDied) ends the server.
    """
    service = app.state.service
    assert isinstance(service, Service)
    service.ready = False
    service.engines.pool.on_unload = service.metrics.engine_totals.end

    async def run(server: UvicornServer) -> None:
        on_stop(server.stop)
        announce()
        _, problems = await service.mcp.start()
        for problem in problems:
            notify(problem)
        service.engines.models()  # starts the refresh, so that the first client gets a complete list
        async with await service.engines.lease("", user=_OWNER) as own:
            if own.info.media:
                from localchat.media.decode import load_decoders

                # The weights are being read meanwhile.
                await asyncio.to_thread(load_decoders, own.info.media)
            # This lease prevents a short keep-alive from unloading the model before it is ready.
            while not await _is_loaded(service.engines):
                await asyncio.sleep(_POLL_S)
        service.ready = True
        notify(f"{sanitize_line(service.engines.resolver.own.name)} is ready")

    return run


async def _is_loaded(engines: AsyncEnginePool) -> bool:
    """Return True once the server's own model is loaded. The lease makes the pool cache its info."""
    async with await engines.lease("", user=_OWNER) as lease:
        return lease.info.loaded
