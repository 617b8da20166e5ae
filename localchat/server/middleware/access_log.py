"""Around every request: its number, its path in one form, and its line in the log.

The line names what happened and never what was said. Pure ASGI, see guard.py.
"""

import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localchat.sanitize import sanitize_line
from localchat.server.tracker import TrackedRequest

log = logging.getLogger("localchat.server.requests")

_SLASHES: Final = re.compile("/{2,}")
_WHOLE: Final = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE)
"""An address with its host, in place of a path."""
_SHOWN: Final = 120


class AccessLogMiddleware:
    """The outermost part of the application. `path`: without `/v1`, without doubled slashes, because
    clients join base addresses and routes in every way there is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _with_a_path(scope)
        number = f"req_{secrets.token_hex(12)}"
        status = 0
        begun_s = time.perf_counter()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", number.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
                if is_anthropic(inner["path"]):
                    message["headers"].append((b"request-id", number.encode()))
            await send(message)

        inner = {**scope, "path": normalize_path(scope["path"]), "localchat.id": number}
        try:
            await self._app(inner, receive, sending)
        finally:
            flight = inner.get("localchat.flight")
            gone = flight is not None and flight.gone
            line = [number, scope["method"], scope["path"][:_SHOWN], str(499 if gone else status)]
            line += _told(flight) if flight is not None else []
            line.append(f"took_ms={(time.perf_counter() - begun_s) * 1000:.0f}")
            line.append(f'ua="{Headers(scope=scope).get("user-agent", "")[:_SHOWN]}"')
            log.info("%s", sanitize_line(" ".join(line)))


def _with_a_path(scope: Scope) -> Scope:
    """The request with a path where it came with a whole address, as to a proxy (RFC 9112, 3.2.2): the host in
    there is the one that is asked for, whatever the header says."""
    found = _WHOLE.fullmatch(scope.get("raw_path") or b"")
    if found is None:
        return scope
    path = found[2] or b"/"
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {
        **scope,
        "path": unquote(path.decode("ascii")),
        "raw_path": path,
        "headers": [(b"host", found[1]), *headers],
    }


def request_id(scope: Scope) -> str:
    """The request's number; empty outside of the AccessLogMiddleware."""
    number: str = scope.get("localchat.id", "")
    return number


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's Messages API."""
    path = normalize_path(path)
    return path == "/messages" or path.startswith("/messages/")


def is_ollama(path: str) -> bool:
    """Whether a path is one of Ollama's API."""
    return normalize_path(path).startswith("/api/")


def normalize_path(path: str) -> str:
    """The path as the routes know it."""
    path = _SLASHES.sub("/", path)
    if path == "/v1" or path.startswith("/v1/"):
        path = path[3:]
    return path.rstrip("/") or "/"


def _told(flight: TrackedRequest) -> Sequence[str]:
    line = [f"model={flight.model[:_SHOWN]}"]
    if flight.usage is not None:
        usage = flight.usage
        line += [
            f"prompt={usage.prompt_tokens}",
            f"cached={usage.cached_tokens}",
            f"completion={usage.completion_tokens}",
        ]
    if flight.first_s is not None:
        line.append(f"ttft_ms={(flight.first_s - flight.arrived_s) * 1000:.0f}")
    if flight.done is not None and flight.done.timings.decode_tokens_per_s is not None:
        line.append(f"tps={flight.done.timings.decode_tokens_per_s:.1f}")
    if flight.finish:
        line.append(f"finish={flight.finish}")
    if flight.error:
        line.append(f"error={flight.error}")
    return line
