"""HTTP clients, which reach this machine without a proxy, and the rule for retries."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx2

from localchat.errors import UsageError

_SECONDS: Final = re.compile(r"[0-9]+(\.[0-9]+)?")
_RETRY_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524})
_HERE: Final = ("localhost", "*.localhost", "127.0.0.1", "[::1]", "0.0.0.0")  # noqa: S104
_DIRECT: Final = {f"all://{host}": None for host in _HERE}
"""Addresses of this machine. A proxy would take them for its own."""


def http_client(**options: Any) -> httpx2.Client:  # noqa: ANN401 - options of httpx2
    """Return a client. Raises UsageError for an invalid proxy in the environment."""
    with _checked_proxies():
        return httpx2.Client(mounts=_DIRECT, **options)


def async_http_client(**options: Any) -> httpx2.AsyncClient:  # noqa: ANN401 - options of httpx2
    """Return an asynchronous client. Raises UsageError for an invalid proxy in the environment."""
    with _checked_proxies():
        return httpx2.AsyncClient(mounts=_DIRECT, **options)


def query_client(key: str = "", timeout_s: float = 5.0) -> httpx2.Client:
    """Return a client for short queries to a server, such as its health."""
    headers = {}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return http_client(headers=headers, timeout=timeout_s)


@contextmanager
def _checked_proxies() -> Iterator[None]:
    try:
        yield
    except (ValueError, httpx2.InvalidURL) as problem:
        raise UsageError(
            f"the proxy of the environment cannot be used: {problem}",
            hint="HTTP_PROXY, HTTPS_PROXY and ALL_PROXY are addresses, such as http://proxy:3128",
        ) from problem


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
