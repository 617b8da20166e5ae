"""Private routes for this user's own programs: the command line and the terminal UI use a running server's
engines through them, with everything that an engine tells.

The token of the registration is asked for on each; it stands for the owner, who may name files, stop models
and stop the server. Frames and routes: engine/door_frames.py.
"""

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from localchat import __version__
from localchat.engine.attached.protocol import (
    MEDIA_TYPE,
    PREFIX,
    AttachSpec,
    GenerateCall,
    Query,
    QueryCall,
    StopCall,
    Stopped,
)
from localchat.engine.interface import Engine
from localchat.engine.local import protocol
from localchat.engine.stream import Stream
from localchat.errors import LocalchatError
from localchat.pool.entry import ServerStatus
from localchat.server.leases import PooledEngines

T = TypeVar("T")
_MOST_BODY_BYTES = 64 << 20


class LocalApi:
    """`stop`: what ends the server, called once the answer is on its way."""

    def __init__(self, engines: PooledEngines, token: str, stop: Callable[[], None]) -> None:
        self._engines = engines
        self._token = token.encode()
        self._stop = stop

    def routes(self) -> list[Route]:
        """All of them, for the app."""
        return [
            Route(f"{PREFIX}/generate", _Framed(self._guarded(self.generate)), methods=["POST"]),
            Route(f"{PREFIX}/query", self._guarded(self.query), methods=["POST"]),
            Route(f"{PREFIX}/ps", self._guarded(self.ps), methods=["GET"]),
            Route(f"{PREFIX}/stop", self._guarded(self.stop), methods=["POST"]),
        ]

    def _guarded(
        self, handle: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                return Response("this token is not the server's", 403)
            try:
                return await handle(request)
            except _BadRequest as refusal:
                return Response(str(refusal), 400)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it

        return guarded

    # ------------------------------------------------------------------------ engines

    async def _lease(self, spec: AttachSpec, user: str) -> Any:  # noqa: ANN401 - a Lease, as a context manager
        return await self._engines.lease_spec(
            lambda: self._engines.finder.resolve_request(spec), user
        )

    async def generate(self, request: Request) -> Response:
        """A stream of frames until Done or Failed; its reader's leaving cancels the request."""
        ask = await _decode(request, GenerateCall)
        return _FrameStream(self._told(ask))

    async def _told(self, ask: GenerateCall) -> AsyncGenerator[msgspec.Struct, None]:
        try:
            async with await self._lease(ask.model, ask.request.user) as lease:
                stream = await self._asked(lease.engine, ask)
                with stream:
                    async for batch in stream.batches():
                        yield protocol.Events(tuple((0, event) for event in batch))
        except LocalchatError as error:
            yield _failed(error)

    async def _asked(self, engine: Engine, ask: GenerateCall) -> Stream:
        """In a thread: a long prompt waits for the child to read it."""
        asking = asyncio.ensure_future(
            self._engines.in_thread(lambda: engine.generate(ask.request))
        )
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(lambda asked: asked.result().close())
            raise

    async def query(self, request: Request) -> Response:
        """One question, one frame."""
        asked = await _decode(request, QueryCall)
        try:
            async with await self._lease(asked.model, asked.user) as lease:
                answer = await self._engines.in_thread(lambda: _answer(lease.engine, asked.query))
        except LocalchatError as error:
            answer = _failed(error)
        return Response(msgspec.msgpack.encode(answer), media_type=MEDIA_TYPE)

    # ------------------------------------------------------------------------ the server

    async def ps(self, request: Request) -> Response:
        """What is loaded, as JSON."""
        models = await self._engines.in_thread(self._engines.pool.loaded)
        told = msgspec.json.encode(ServerStatus(__version__, tuple(models)))
        return Response(told, media_type="application/json")

    async def stop(self, request: Request) -> Response:
        """Unload a model, or end the server."""
        wanted = await _decode(request, StopCall)
        ended: int | None = None
        if wanted.model is None:
            asyncio.get_running_loop().call_later(0.1, self._stop)
        else:
            word = wanted.model
            try:
                ended = await self._engines.in_thread(lambda: self._engines.pool.unload(word))
            except LocalchatError as error:
                return Response(msgspec.msgpack.encode(_failed(error)), 409, media_type=MEDIA_TYPE)
        return Response(msgspec.msgpack.encode(Stopped(ended)), media_type=MEDIA_TYPE)


class _BadRequest(Exception):
    """The body is nothing that a door of this version sends."""


async def _decode(request: Request, kind: type[T]) -> T:
    if request.headers.get("content-type") != MEDIA_TYPE:
        raise _BadRequest(f"the content type must be {MEDIA_TYPE}")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BODY_BYTES:
            raise _BadRequest(f"more than {_MOST_BODY_BYTES} bytes")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as problem:
        raise _BadRequest(f"no {kind.__name__}: {problem}") from problem


def _answer(engine: Engine, query: Query) -> msgspec.Struct:
    match query:
        case protocol.Tokenize(id_, text, special):
            return protocol.TokensReply(id_, tuple(engine.tokenize(text, special=special)))
        case protocol.Detokenize(id_, tokens):
            return protocol.TextReply(id_, engine.detokenize(tokens))
        case protocol.Render(id_, messages):
            return protocol.TextReply(id_, engine.render(messages))
        case protocol.Embed(id_, texts):
            vectors = engine.embed(texts)
            return protocol.VectorsReply(id_, vectors, vectors.tokens)
        case protocol.GetInfo(id_):
            return protocol.InfoReply(id_, engine.info())
        case protocol.GetStats(id_):
            return protocol.StatsReply(id_, engine.stats())


def _failed(error: LocalchatError) -> protocol.Failed:
    sendable = protocol.sendable
    return protocol.Failed(
        0, error.code, sendable(error.message), sendable(error.hint), error.details
    )


# ---------------------------------------------------------------------------- the wire


class _Framed:
    """An ASGI app, because a Route gives a plain function no `receive` once the body is read."""

    def __init__(self, handle: Callable[[Request], Awaitable[Response]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handle(Request(scope, receive, send))
        await response(scope, receive, send)


class _FrameStream(Response):
    """Frames as they come; the reader's leaving ends the source at once, also while nothing comes."""

    media_type = MEDIA_TYPE

    def __init__(self, source: AsyncGenerator[msgspec.Struct, None]) -> None:
        super().__init__()
        self._source = source
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        telling = asyncio.ensure_future(self._tell(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait([telling, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (telling, leaving):
                task.cancel()
            results = await asyncio.gather(telling, leaving, return_exceptions=True)
        if isinstance(results[0], Exception) and not isinstance(results[0], OSError):
            raise results[0]

    async def _tell(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        source = self._source
        try:
            async for frame in source:
                await send(
                    {
                        "type": "http.response.body",
                        "body": protocol.framed(msgspec.msgpack.encode(frame)),
                        "more_body": True,
                    }
                )
            await send({"type": "http.response.body", "body": b""})
        finally:
            await source.aclose()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
