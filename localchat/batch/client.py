"""HTTP client of a batch, which uses persistent connections and retries requests."""

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple

import httpx2
import msgspec

from localchat.engine.remote.client import CONNECT_S, base_url
from localchat.engine.remote.errors import error_from_status
from localchat.errors import LocalchatError, NetworkError, connection_failure
from localchat.http_transport import AsyncProxyTransport, may_retry, retry_after_s
from localchat.proxies import proxy_for

_ANSWER_S: Final = 3600.0
"""Timeout of a request, which receives nothing before its answer is complete."""
_TRIES: Final = 8
_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 60.0
_KEY_REJECTED: Final = (401, 403)


class BatchReply(NamedTuple):
    """Reply of a server to a request."""

    status: int
    request_id: str
    body: Any
    """JSON, or text if the reply is not JSON."""
    ignored_fields: str
    """Names of the request's fields that the server ignored, with commas."""


class BatchClient:
    """Posts requests to one server. Use it as an asynchronous context manager."""

    def __init__(self, url: str, key: str, clients: int) -> None:
        """clients: maximum number of requests in flight."""
        self.base = base_url(url)
        headers = {"User-Agent": "localchat"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(_ANSWER_S, connect=CONNECT_S, pool=None),
            transport=AsyncProxyTransport(
                httpx2.Limits(max_connections=clients, max_keepalive_connections=clients)
            ),
        )

    async def __aenter__(self) -> "BatchClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def post(self, path: str, body: Mapping[str, Any]) -> BatchReply:
        """Post a request, up to eight times if the server or the connection fails.

        Raises NetworkError if no try reached the server, and the server's error if it rejects the key.
        """
        content = msgspec.json.encode(body)
        error: Exception | None = None
        for attempt in range(_TRIES):
            is_last = attempt == _TRIES - 1
            pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
            try:
                reply = await self._client.post(
                    f"{self.base}{path}",
                    content=content,
                    headers={"Content-Type": "application/json"},
                )
            except httpx2.HTTPError as problem:
                error = problem
            else:
                if reply.status_code in _KEY_REJECTED:
                    raise error_from_status(reply.status_code, reply.text, self.base)
                if is_last or not may_retry(reply):
                    return _reply(reply)
                requested_s = retry_after_s(reply.headers.get("retry-after")) or 0.0
                pause_s = max(pause_s, min(requested_s, _MAX_PAUSE_S))
            if not is_last:
                await asyncio.sleep(pause_s)
        raise self._unreachable(error)

    def _unreachable(self, trouble: Exception | None) -> LocalchatError:
        failure = connection_failure(
            trouble or ConnectionError(), self.base, proxy=proxy_for(self.base)
        )
        return NetworkError(failure.message, hint=failure.hint, unreachable=True)


def _reply(reply: httpx2.Response) -> BatchReply:
    try:
        body = msgspec.json.decode(reply.content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        body = reply.text
    request_id = reply.headers.get("x-request-id", "")
    if not request_id and isinstance(body, dict) and isinstance(body.get("id"), str):
        request_id = body["id"]
    ignored_fields = reply.headers.get("x-localchat-ignored", "")
    return BatchReply(reply.status_code, request_id, body, ignored_fields)
