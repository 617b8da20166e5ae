"""A server of private routes on a real socket, over a pool of given engines."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette

from localchat.engine.attached.engine import AttachedEngine, ServerClient
from localchat.engine.attached.protocol import AttachSpec
from localchat.engine.options import EngineOptions
from localchat.errors import ModelMissing
from localchat.pool.admission import AdmissionResult
from localchat.pool.entry import ModelSpec, OpenEngine
from localchat.pool.pool import EnginePool
from localchat.pool.resolver import ModelCard
from localchat.server.leases import AsyncEnginePool
from localchat.server.local_api import LocalApi

TOKEN = "the-token"


class FakeResolver:
    """Resolves the models that it was given."""

    stale = False

    def __init__(self, options: dict[str, EngineOptions]) -> None:
        self._options = options

    def resolve(self, word: str) -> ModelSpec:
        name = word or next(iter(self._options))
        if name not in self._options:
            raise ModelMissing(f"no model {word}")
        return ModelSpec(name, self._options[name])

    def resolve_request(self, spec: AttachSpec) -> ModelSpec:
        return self.resolve(spec.name)

    def models(self) -> tuple[ModelCard, ...]:
        return tuple(ModelCard(name) for name in self._options)

    def refresh(self) -> None:
        pass


class Running:
    """`stopped` is set by the route that ends the server."""

    def __init__(self, port: int, pool: EnginePool, stopped: threading.Event) -> None:
        self.port = port
        self.pool = pool
        self.stopped = stopped
        self.server = ServerClient(f"http://127.0.0.1:{port}", TOKEN)

    def attach(self, name: str, user: str = "test") -> AttachedEngine:
        return AttachedEngine(self.server, AttachSpec(model=b"/x", name=name), user)


@contextmanager
def running(
    options: dict[str, EngineOptions], open_engine: OpenEngine, **settings: float
) -> Iterator[Running]:
    """A server until the end of the block."""
    resolver = FakeResolver(options)
    pool = EnginePool(
        resolver.resolve,
        open_engine,
        lambda options, loaded: AdmissionResult(fits=True),
        **{"keep_alive_s": -1.0, **settings},  # type: ignore[arg-type]
    )
    stopped = threading.Event()
    api = LocalApi(AsyncEnginePool(pool, resolver), TOKEN, stopped.set)  # type: ignore[arg-type]
    app = Starlette(routes=api.routes())
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            until(lambda: server.started)
            yield Running(listening.getsockname()[1], pool, stopped)
        finally:
            server.should_exit = True
            thread.join(90)
            pool.close()


def until(true: Callable[[], bool], patience_s: float = 90.0) -> None:
    end_s = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < end_s, "it never came to be"
        time.sleep(0.005)
