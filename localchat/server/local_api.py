"""Private HTTP API for the owner's CLI and TUI, which attach to a running server.

Every route requires the token of the server registry. The token represents the owner, who may name files,
unload models and stop the server. Frames and routes: engine/attached/protocol.py.
"""

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from localchat import __version__
from localchat.engine.attached.protocol import (
    MEDIA_TYPE,
    PREFIX,
    AttachSpec,
    GenerateCall,
    QueryCall,
    StopCall,
    Stopped,
)
from localchat.engine.interface import Engine
from localchat.engine.local import protocol
from localchat.errors import LocalchatError
from localchat.pool.entry import ServerStatus
from localchat.server.leases import AsyncEnginePool, AsyncLease

T = TypeVar("T")
_MAX_BODY_BYTES = 128 << 20


class LocalApi:
    """The private routes."""

    def __init__(self, engines: AsyncEnginePool, token: str, stop: Callable[[], None]) -> None:
        """`stop` ends the server. It is called after the response is sent."""
        self._engines = engines
        self._token = token.encode()
        self._stop = stop

    def routes(self) -> list[Route]:
        """Return all routes."""
        return [
            Route(f"{PREFIX}/generate", self._authorized(self.generate), methods=["POST"]),
            Route(f"{PREFIX}/query", self._authorized(self.query), methods=["POST"]),
            Route(f"{PREFIX}/ps", self._authorized(self.ps), methods=["GET"]),
            Route(f"{PREFIX}/stop", self._authorized(self.stop), methods=["POST"]),
        ]

    def _authorized(
        self, handle: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            header = request.headers.get("authorization", "").encode("utf-8", "replace")
            if not hmac.compare_digest(header, b"Bearer " + self._token):
                return Response("this is not the server's token", 403)
            try:
                return await handle(request)
            except _BadRequest as refusal:
                return Response(str(refusal), 400)
            except ClientDisconnect:
                return Response(status_code=499)  # only for the log

        return checked

    async def _lease(self, spec: AttachSpec, user: str) -> AsyncLease:
        resolver = self._engines.resolver
        return await self._engines.lease_spec(lambda: resolver.resolve_request(spec), user)

    async def generate(self, request: Request) -> Response:
        """Stream frames until Done or Failed. A client that disconnects cancels the request."""
        call = await _decode(request, GenerateCall)
        frames = (
            protocol.frame_bytes(msgspec.msgpack.encode(frame))
            async for frame in self._frames(call)
        )
        return StreamingResponse(frames, media_type=MEDIA_TYPE)

    async def _frames(self, call: GenerateCall) -> AsyncGenerator[msgspec.Struct, None]:
        try:
            async with await self._lease(call.model, call.request.user) as lease:
                # This process would write the file, with its own rights.
                request = msgspec.structs.replace(call.request, prompt_logprobs_file="")
                with lease.engine.generate(request) as stream:
                    async for batch in stream.batches():
                        yield protocol.Events(tuple((0, event) for event in batch))
        except LocalchatError as error:
            yield protocol.Failed.of(0, error)

    async def query(self, request: Request) -> Response:
        """Answer one query with one frame."""
        call = await _decode(request, QueryCall)
        try:
            async with await self._lease(call.model, call.user) as lease:
                answer = await self._engines.in_thread(lambda: _answer(lease.engine, call.query))
        except LocalchatError as error:
            answer = protocol.Failed.of(0, error)
        return _frame_response(answer)

    async def ps(self, request: Request) -> Response:
        """Report the loaded models, as JSON."""
        models = await self._engines.in_thread(self._engines.pool.loaded)
        body = msgspec.json.encode(ServerStatus(__version__, tuple(models)))
        return Response(body, media_type="application/json")

    async def stop(self, request: Request) -> Response:
        """Unload a model, or end the server."""
        call = await _decode(request, StopCall)
        ended: int | None = None
        if call.model is None:
            # The response must be sent before the server stops.
            asyncio.get_running_loop().call_later(0.1, self._stop)
        else:
            model = call.model
            try:
                ended = await self._engines.in_thread(lambda: self._engines.pool.unload(model))
            except LocalchatError as error:
                return _frame_response(protocol.Failed.of(0, error), 409)
        return _frame_response(Stopped(ended))


def _frame_response(frame: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.msgpack.encode(frame), status, media_type=MEDIA_TYPE)


class _BadRequest(Exception):
    """The body is not one that a client of this version sends."""


async def _decode(request: Request, kind: type[T]) -> T:
    if request.headers.get("content-type") != MEDIA_TYPE:
        raise _BadRequest(f"the content type must be {MEDIA_TYPE}")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY_BYTES:
            raise _BadRequest(f"more than {_MAX_BODY_BYTES} bytes")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.DecodeError as problem:
        raise _BadRequest(f"no {kind.__name__}: {problem}") from problem


def _answer(engine: Engine, query: protocol.Query) -> msgspec.Struct:
    match query:
        case protocol.Tokenize(id_, text, special):
            return protocol.TokensReply(id_, tuple(engine.tokenize(text, special=special)))
        case protocol.Detokenize(id_, tokens):
            return protocol.TextReply(id_, engine.detokenize(tokens))
        case protocol.Render(id_, messages):
            return protocol.TextReply(id_, engine.render(messages))
        case protocol.PromptTokens(id_, messages):
            return protocol.TokensReply(id_, tuple(engine.prompt_tokens(messages)))
        case protocol.Embed(id_, texts, truncate):
            vectors = engine.embed(texts, truncate=truncate)
            return protocol.VectorsReply(id_, vectors, vectors.tokens)
        case protocol.GetInfo(id_):
            return protocol.InfoReply(id_, engine.info())
        case protocol.GetStats(id_):
            return protocol.StatsReply(id_, engine.stats())
