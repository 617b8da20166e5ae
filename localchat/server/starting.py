"""The first load, beside a server that answers already: `/health` says when the model is there."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette

from localchat.server.engines import Engines
from localchat.server.run import Server
from localchat.server.service import Service

_EVERY_S = 0.2


def starting(
    app: Starlette,
    tell: Callable[[], None],
    say: Callable[[str], None],
    stopping: Callable[[Callable[[], None]], None] = lambda end: None,
) -> Callable[[Server], Awaitable[None]]:
    """What `serve` runs beside itself: tells where the server is, once signals end it well; loads its own
    model and says when that is ready. `stopping` is told how to end the server. A failure (ModelInvalid,
    DoesNotFit, EngineDied) is the server's."""
    service = app.state.service
    assert isinstance(service, Service)
    service.ready = False

    async def run(server: Server) -> None:
        stopping(server.stop)
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
