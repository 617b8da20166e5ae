"""Everything behind a server's routes: the pool over the library, the private routes of its owner, and the
registration by which the owner's programs find it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.routing import Route

from localchat.config.paths import Paths
from localchat.models.resolve import ResolvedModel
from localchat.pool.admission import MemoryAdmission
from localchat.pool.entry import OpenEngine
from localchat.pool.pool import EnginePool
from localchat.pool.resolver import ModelResolver, SettingsFor
from localchat.pool.server_registry import new_token, register
from localchat.server.leases import Engines, PooledEngines
from localchat.server.local_api import LocalApi
from localchat.server.state import Service
from localchat.server.uvicorn_server import UvicornServer


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How a house is opened. own: the server's own model. keep_alive_s: see EnginePool. queue: requests that
    may wait for one engine."""

    own: ResolvedModel
    settings_for: SettingsFor
    paths: Paths
    environ: Mapping[str, str]
    open_engine: OpenEngine
    say: Callable[[str], None]
    keep_alive_s: float
    max_slots: int = 16
    queue: int = 128


class ServerContext:
    """`engines` and the `private` routes are for the app; `stopping` is told how to end the server once it
    runs; inside `registered(url)` the owner's programs find it."""

    def __init__(self, engines: PooledEngines, paths: Paths, say: Callable[[str], None]) -> None:
        self.engines = engines
        self._paths = paths
        self._say = say
        self._token = new_token()
        self._end: Callable[[], None] = lambda: None
        self.private: list[Route] = LocalApi(engines, self._token, lambda: self._end()).routes()

    def on_stop(self, end: Callable[[], None]) -> None:
        """`end` ends the server, from its own loop."""
        self._end = end

    @contextmanager
    def registered(self, url: str) -> Iterator[None]:
        """`url`: as this machine reaches the server. A state folder that cannot be written is said, and the
        server goes unfound."""
        try:
            known = register(self._paths, url, self._token, time.time())
        except OSError as problem:
            self._say(f"other programs of yours will not find this server: {problem}")
            yield
            return
        try:
            yield
        finally:
            known.withdraw()


@contextmanager
def open_server_context(wish: ServerSpec) -> Iterator[ServerContext]:
    """A house whose engines end with the block."""
    finder = ModelResolver(
        wish.own, wish.settings_for, wish.paths, wish.environ, max_slots=wish.max_slots
    )
    pool = EnginePool(
        finder,
        wish.open_engine,
        MemoryAdmission(),
        keep_alive_s=wish.keep_alive_s,
        queue=wish.queue,
        say=wish.say,
    )
    engines = PooledEngines(pool, finder)
    try:
        yield ServerContext(engines, wish.paths, wish.say)
    finally:
        engines.close()


# The first load, beside a server that answers already: `/health` says when the model is there.


_EVERY_S = 0.2


def startup_task(
    app: Starlette,
    tell: Callable[[], None],
    say: Callable[[str], None],
    on_stop: Callable[[Callable[[], None]], None] = lambda end: None,
) -> Callable[[UvicornServer], Awaitable[None]]:
    """What `serve` runs beside itself: tells where the server is, once signals end it well; loads its own
    model and says when that is ready. `stopping` is told how to end the server. A failure (ModelInvalid,
    DoesNotFit, EngineDied) is the server's."""
    service = app.state.service
    assert isinstance(service, Service)
    service.ready = False

    async def run(server: UvicornServer) -> None:
        on_stop(server.stop)
        tell()
        service.engines.models()  # so that the first client that asks finds them looked up
        async with await service.engines.lease("", user="start"):
            while not await _loaded(service.engines):
                await asyncio.sleep(_EVERY_S)
        service.ready = True
        say("the model is ready")

    return run


async def _loaded(engines: Engines) -> bool:
    """Whether the own model is there. Asked by a lease, from which its owner learns it too."""
    async with await engines.lease("", user="start") as lease:
        return lease.info.loaded
