"""Access log middleware: request ids, normalized paths, and one log line per request.

The line contains no text of a prompt or an answer. Pure ASGI, see security.py.
"""

import logging
import secrets
import time
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localchat.engine.attached.protocol import PREFIX
from localchat.sanitize import sanitize_line
from localchat.server.errors import REFUSAL, ApiError
from localchat.server.fields import HEADER, IGNORED, header_value
from localchat.server.paths import is_anthropic, normalize_path
from localchat.server.tracker import TrackedRequest

log = logging.getLogger("localchat.server.requests")

_MAX_LOGGED: Final = 120
_QUIET_ROUTES: Final = (f"{PREFIX}/ps", f"{PREFIX}/query")
_FIRST_ERROR: Final = 400
_MIN_LOAD_S: Final = 0.1
"""Shorter loads are not logged: the model was loaded already."""


class AccessLogMiddleware:
    """The outermost middleware. It normalizes paths, because clients join base URLs and routes in many ways."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        id_ = f"req_{secrets.token_hex(12)}"
        status = 0
        started_s = time.perf_counter()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-request-id", id_.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
                if ignored := inner.get(IGNORED):
                    message["headers"].append((HEADER, header_value(ignored)))
                if is_anthropic(inner):
                    message["headers"].append((b"request-id", id_.encode()))
            await send(message)

        inner = {**scope, "path": normalize_path(scope["path"]), "localchat.id": id_}
        try:
            await self._app(inner, receive, sending)
        finally:
            tracked: TrackedRequest | None = inner.get("localchat.request")
            if tracked is not None and tracked.client_left:
                status = 499
            line = [id_, scope["method"], scope["path"][:_MAX_LOGGED], str(status)]
            if tracked is not None:
                line += _request_fields(tracked)
            line += _error_fields(inner.get(REFUSAL), tracked)
            if ignored := inner.get(IGNORED):
                line.append(f"ignored={header_value(ignored).decode().replace(' ', '')}")
            line.append(f"took_ms={(time.perf_counter() - started_s) * 1000:.0f}")
            line.append(f'ua="{Headers(scope=scope).get("user-agent", "")[:_MAX_LOGGED]}"')
            # `localchat ps` and attached prompts ask often, and their answers are of no interest.
            level = logging.INFO
            if status < _FIRST_ERROR and inner["path"] in _QUIET_ROUTES:
                level = logging.DEBUG
            log.log(level, "%s", sanitize_line(" ".join(line)))


def _request_fields(tracked: TrackedRequest) -> Sequence[str]:
    line = [f"model={tracked.model[:_MAX_LOGGED]}"]
    if tracked.usage is not None:
        line.append(f"prompt={tracked.usage.prompt_tokens}")
        line.append(f"cached={tracked.usage.cached_tokens}")
        if tracked.why_missed:
            line.append(f'missed="{tracked.why_missed}"')
        line.append(f"completion={tracked.usage.completion_tokens}")
    load_s = tracked.load_s
    if tracked.done is not None:
        load_s = tracked.done.timings.load_s
    if load_s >= _MIN_LOAD_S:
        line.append(f"load_ms={load_s * 1000:.0f}")
    if tracked.first_token_s is not None:
        # As everywhere, the load of the model is not part of TTFT.
        ttft_s = tracked.first_token_s - tracked.arrived_s - load_s
        line.append(f"ttft_ms={max(0, ttft_s) * 1000:.0f}")
    if tracked.done is not None and tracked.done.timings.decode_tokens_per_s is not None:
        line.append(f"tps={tracked.done.timings.decode_tokens_per_s:.1f}")
    if tracked.done is not None and tracked.done.speculation.speedup is not None:
        line.append(f"speedup={tracked.done.speculation.speedup:.2f}")
    if tracked.finish_reason:
        line.append(f"finish={tracked.finish_reason}")
    return line


def _error_fields(refusal: ApiError | None, tracked: TrackedRequest | None) -> Sequence[str]:
    """Return the code of an error, and the field of the request that caused it."""
    code = ""
    if refusal is not None:
        code = refusal.label
    if tracked is not None and tracked.error:
        code = tracked.error
    fields = []
    if code:
        fields.append(f"error={code}")
    if refusal is not None and refusal.param:
        fields.append(f"param={refusal.param[:_MAX_LOGGED].replace(' ', '')}")
    return fields
