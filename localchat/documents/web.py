"""Fetches the document behind a URL."""

from typing import Final
from urllib.parse import urlsplit

import httpx2

from localchat.documents.pages import MAX_FILE_BYTES
from localchat.errors import NetworkError, UsageError, connection_failure
from localchat.http_transport import ProxyTransport
from localchat.proxies import proxy_for

_SILENCE_S: Final = 30.0
_MAX_REDIRECTS: Final = 5


def fetch(url: str) -> tuple[str, bytes]:
    """Download a document, and return its name and bytes. Raises NetworkError, UsageError."""
    data = bytearray()
    try:
        with (
            httpx2.Client(
                headers={"User-Agent": "localchat"},
                timeout=_SILENCE_S,
                transport=ProxyTransport(),
                follow_redirects=True,
                max_redirects=_MAX_REDIRECTS,
            ) as client,
            client.stream("GET", url) as response,
        ):
            if response.status_code != 200:
                raise NetworkError(f"{url} returned status {response.status_code}")
            for piece in response.iter_bytes():
                data += piece
                if len(data) > MAX_FILE_BYTES:
                    raise UsageError(f"{url} has more than {MAX_FILE_BYTES >> 20} MB")
            name = urlsplit(str(response.url)).path.rpartition("/")[2] or "index"
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    except (httpx2.InvalidURL, ValueError) as problem:
        raise UsageError(f"{url} is not the address of a document: {problem}") from problem
    except httpx2.HTTPError as problem:
        failure = connection_failure(problem, url, proxy=proxy_for(url))
        raise NetworkError(failure.message, hint=failure.hint) from problem
    if kind in ("text/html", "application/xhtml+xml") and not name.endswith((".html", ".htm")):
        name = f"{name}.html"
    return name, bytes(data)
