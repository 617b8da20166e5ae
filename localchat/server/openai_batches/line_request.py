"""One line of a batch as a request to the routes of this server, without a connection."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
from starlette.types import ASGIApp, Message, Scope

from localchat.batch.client import BatchReply
from localchat.server.formatters import new_id
from localchat.server.openai.requests import Client
from localchat.server.state import CLIENT

_HOST: Final = "localhost"
_AGAIN: Final = frozenset({429, 502, 503, 504})


class LineReply(NamedTuple):
    """What a route answered to a line."""

    answer: BatchReply
    may_retry: bool
    """The same request may succeed later."""


async def ask(app: ASGIApp, path: str, body: Mapping[str, Any], client: Client) -> LineReply:
    """Send a request and wait for its whole answer. Cancelling it stops the engine's work."""
    content = msgspec.json.encode(body)
    request_id = new_id("req_")
    waiting = [{"type": "http.request", "body": content, "more_body": False}]
    status = 500
    final = False
    pieces = list[bytes]()

    async def receive() -> Message:
        if waiting:
            return waiting.pop()
        await asyncio.get_running_loop().create_future()  # a connection that never closes
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, final
        if message["type"] == "http.response.start":
            status = message["status"]
            final = (b"x-should-retry", b"false") in message["headers"]
        else:
            pieces.append(message.get("body", b""))

    await app(_scope(path, len(content), request_id, client), receive, send)
    text = b"".join(pieces)
    try:
        answer = msgspec.json.decode(text)
    except msgspec.DecodeError:
        answer = text.decode("utf-8", "replace")
    return LineReply(BatchReply(status, request_id, answer), status in _AGAIN and not final)


def _scope(path: str, size: int, request_id: str, client: Client) -> Scope:
    headers = {
        "host": _HOST,
        "content-type": "application/json",
        "content-length": str(size),
        "user-agent": client.user,
    }
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path.removeprefix("/v1"),
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "server": (_HOST, 0),
        "client": None,
        "localchat.id": request_id,
        CLIENT: client,
    }
