"""Transports of the HTTP clients, which choose a proxy for each request, and the rule for retries.

A redirect may lead from a public server to this machine and back, so a client cannot use a single proxy.
"""

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

import httpx2

from localchat.proxies import Proxy, proxy_for

_SECONDS: Final = re.compile(r"[0-9]+(\.[0-9]+)?")
_RETRY_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524})
DEFAULT_LIMITS: Final = httpx2.Limits(max_connections=100, max_keepalive_connections=20)


class ProxyTransport(httpx2.BaseTransport):
    """Sends each request directly or through its proxy."""

    def __init__(self, limits: httpx2.Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._transports: dict[Proxy | None, httpx2.HTTPTransport] = {}

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request. Raises UsageError for a bad proxy, and what httpx2 raises."""
        proxy = proxy_for(str(request.url))
        transport = self._transports.get(proxy)
        if transport is None:
            # Two threads may both create a transport, and setdefault keeps the first.
            created = httpx2.HTTPTransport(limits=self._limits, proxy=proxy and proxy.url)
            transport = self._transports.setdefault(proxy, created)
        return transport.handle_request(request)

    def close(self) -> None:
        """Close all connections."""
        for transport in list(self._transports.values()):
            transport.close()


def may_retry(response: httpx2.Response) -> bool:
    """Return True if the same request may succeed later, unless the server asks not to repeat it."""
    if response.headers.get("x-should-retry") == "false":
        return False
    return response.status_code in _RETRY_STATUSES


def retry_after_s(header: str | None) -> float | None:
    """Return the seconds of a `Retry-After` header, a number or a date. None if it is unusable."""
    if not header:
        return None
    if _SECONDS.fullmatch(header.strip()):
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return None
    aware = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())


def query_client(key: str = "") -> httpx2.Client:
    """Return a client for short queries to a server, such as its health."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(transport=ProxyTransport(), headers=headers, timeout=5.0)


class AsyncProxyTransport(httpx2.AsyncBaseTransport):
    """Sends each request directly or through its proxy."""

    def __init__(self, limits: httpx2.Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._transports: dict[Proxy | None, httpx2.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request. Raises UsageError for a bad proxy, and what httpx2 raises."""
        proxy = proxy_for(str(request.url))
        transport = self._transports.get(proxy)
        if transport is None:
            transport = httpx2.AsyncHTTPTransport(limits=self._limits, proxy=proxy and proxy.url)
            self._transports[proxy] = transport
        return await transport.handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        for transport in list(self._transports.values()):
            await transport.aclose()
