"""The running server: sockets, signals, graceful shutdown."""

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from localchat.errors import LocalchatError, UsageError
from localchat.server.state import Service
from localchat.server.uvicorn_http import HEAD_BYTES, connection_class
from localchat.units import counted

log = logging.getLogger("localchat.server")

_BACKLOG = 1024
_THREADS = 64
_POLL_S = 0.05
_TICK_S = 1.0
"""Interval at which the server updates the date of its responses."""
_GRACE_S = 2
_CUT_OFF_S = 1.5
"""Part of the grace in which clients can read the end of their answer."""
_FILES = 256
"""Open files other than connections: pipes of engine processes, logs, model files."""


class UvicornServer(uvicorn.Server):
    """uvicorn's server with a graceful shutdown.

    The shutdown rejects new requests, waits for those in progress, ends them with an error, and unloads all
    models.
    """

    def __init__(self, app: Starlette, drain_s: float) -> None:
        """`drain_s`: longest wait for requests in progress. A second signal ends it."""
        service = app.state.service
        assert isinstance(service, Service)
        self._service = service
        self._drain_s = drain_s
        self.background: asyncio.Future[None] | None = None
        """Task that the shutdown cancels first, such as the load of the first model."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        limits = service.config.limits
        super().__init__(
            uvicorn.Config(
                app,
                http=connection_class(limits),
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                h11_max_incomplete_event_size=HEAD_BYTES,
                timeout_keep_alive=int(limits.idle_s),
                timeout_graceful_shutdown=_GRACE_S,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        # With Python's default of six threads on two cores, six long texts to tokenize would block every chat.
        threads = ThreadPoolExecutor(_THREADS, "server")
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(threads)
        raise_file_limit(self._service.config.limits.connections)
        await super().serve(sockets)

    def stop(self) -> None:
        """End the server. Callable from any thread and from signal handlers."""
        self.should_exit = True
        if self._loop is not None:
            # The loop may be closed.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)

    async def main_loop(self) -> None:
        """Wait for `stop`. uvicorn polls ten times per second, a tenth of the CPU time of a lone client."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tracker = self._service.tracker
        tracker.stop_accepting()
        if self.background is not None:
            self.background.cancel()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._drain_s
        if requests := tracker.running + tracker.waiting:
            log.info(
                "ending after %s in progress, or %g s; Ctrl+C again ends at once",
                counted(requests, "request"),
                self._drain_s,
            )
        while self.server_state.tasks and loop.time() < end_s and not self.force_exit:
            await asyncio.sleep(_POLL_S)
        tracker.abort_all()
        await self._service.mcp.close()
        # Threads that wait for an engine end only with it, and the event loop waits for them. If all threads of
        # the server wait, closing the engines needs a thread of its own.
        with ThreadPoolExecutor(1, "close") as thread:
            await loop.run_in_executor(thread, self._service.engines.close)
        if self.background is not None:
            await asyncio.gather(self.background, return_exceptions=True)
        cut_off = loop.call_later(0 if self.force_exit else _CUT_OFF_S, self._cut_off)
        await super().shutdown(sockets)
        cut_off.cancel()

    def _cut_off(self) -> None:
        """Drop clients that do not read the end of their answer. uvicorn would log a traceback for each one."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.stop()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Shut down gracefully on Ctrl+C, SIGTERM and SIGHUP (a closed terminal).

        Under nohup, SIGHUP stays ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    app: Starlette,
    sockets: Sequence[socket.socket],
    *,
    drain_s: float = 5.0,
    background: Callable[[UvicornServer], Awaitable[None]] | None = None,
) -> None:
    """Serve on these sockets until a signal arrives.

    background: task for the same event loop, such as the load of the first model. The end of the server cancels
    it. Its failure ends the server and is raised here.
    """
    server = UvicornServer(app, drain_s)

    def stop_after_failure(task: "asyncio.Future[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            server.stop()

    async def run() -> None:
        if background is not None:
            server.background = asyncio.ensure_future(background(server))
            server.background.add_done_callback(stop_after_failure)
        await server.serve(list(sockets))
        if server.background is not None and not server.background.cancelled():
            server.background.result()

    asyncio.run(run())


def raise_file_limit(connections: int) -> None:
    """Raise the limit of open files if allowed. The default of macOS is 256."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _FILES
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets for a host. 127.0.0.1 includes IPv6's loopback if available.

    Port 0 picks a free port. Raises UsageError for an unknown host, LocalchatError for a port in use.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(
            f"--host {host} is not an address of this machine ({error.strerror or error})",
            hint="127.0.0.1 is this machine only, 0.0.0.0 all its networks",
        ) from error
    family, _, _, _, address = addresses[0]
    first = _listen(family, (str(address[0]), port), host)
    sockets = [first]
    if address[0] == "127.0.0.1" and socket.has_ipv6:
        try:
            sockets.append(_listen(socket.AF_INET6, ("::1", first.getsockname()[1]), "::1"))
        except LocalchatError:
            log.debug("no IPv6 loopback")
    return sockets


def _listen(family: int, address: tuple[str, int], host: str) -> socket.socket:
    # asyncio turns off Nagle's algorithm only for sockets that name TCP as their protocol. With the algorithm,
    # the end of a response waits 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, address[1]) from error
    return listener


def _bind_error(error: OSError, host: str, port: int) -> LocalchatError:
    if error.errno == errno.EADDRINUSE:
        return LocalchatError(
            f"port {port} on {host} is in use by another program",
            hint=f"to use another port: --port {port + 1}",
            port_in_use=True,
        )
    if error.errno == errno.EACCES:
        return LocalchatError(
            f"port {port} on {host} needs administrator rights",
            hint="ports from 1024 on need none: --port 8114",
        )
    return LocalchatError(
        f"{host} port {port} cannot be used: {error.strerror}",
        hint="choose another: --host, --port",
    )
