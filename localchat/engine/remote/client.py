"""HTTP client of a remote server, with limits on time and size. Closing the connection cancels a request."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from localchat.engine.open_call import OpenCall
from localchat.engine.remote.errors import error_from_status
from localchat.errors import (
    EngineClosed,
    LocalchatError,
    NetworkError,
    UsageError,
    connection_failure,
)
from localchat.http_transport import ProxyTransport
from localchat.proxies import proxy_for

CONNECT_S: Final = 10.0
QUERY_TIMEOUT_S: Final = 30.0
"""Timeout in seconds of queries that do not need the model."""
_MAX_LINE_BYTES: Final = 16 << 20
_MAX_BODY_BYTES: Final = 64 << 20
_MAX_ERROR_BYTES: Final = 64 << 10
_ROUTE: Final = re.compile(
    r"(?:/v1(?:/(?:chat/)?completions|/models|/responses|/messages)?|/chat/completions)$"
)
"""End of an address that users copy from the documents of a server."""
_JSON: Final = {"Content-Type": "application/json"}
_CONNECTED: Final = ("connect_tcp.complete", "start_tls.complete")


class RemoteClient:
    """Requests to one server."""

    def __init__(self, url: str, key: str, silence_s: float) -> None:
        """Raises UsageError for an invalid address or key, without repeating possible secrets."""
        self.base = base_url(url)
        """Address without secrets, for messages."""
        headers = {"User-Agent": "localchat", "Accept-Encoding": "identity"}
        if key:
            if not (key.isascii() and key.isprintable()) or " " in key:
                raise UsageError(
                    f"the key for {self.base} contains invalid characters",
                    hint="a key is one line without spaces; check `key_env` or `key_file` of the remote",
                )
            headers["Authorization"] = f"Bearer {key}"
        self._closed = False
        self._client = httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(silence_s, connect=CONNECT_S),
            transport=ProxyTransport(
                httpx2.Limits(max_connections=None, max_keepalive_connections=0)
            ),
            follow_redirects=False,
        )

    def close(self) -> None:
        self._closed = True
        self._client.close()

    def stream(
        self, path: str, body: Mapping[str, Any], call: OpenCall
    ) -> AbstractContextManager[httpx2.Response]:
        """Send a POST request on its own connection. Raises what httpx2 raises, and UsageError."""

        def trace(name: str, info: Mapping[str, Any]) -> None:
            """Pass the connection to the call. The HTTP library calls this at each step."""
            if name.endswith(_CONNECTED):
                call.begin(info["return_value"].get_extra_info("socket"))

        return self._client.stream(
            "POST",
            self._url(path),
            content=_encoded(body),
            headers=_JSON,
            extensions={"trace": trace},
        )

    def request_json(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        root: bool = False,
        timeout_s: float = QUERY_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Send a GET request, or POST a body, and return the reply's JSON object.

        Raises NetworkError, ModelMissing, UsageError, ContextExceeded, EngineClosed.
        """
        method = "GET"
        content = None
        if body is not None:
            method = "POST"
            content = _encoded(body)
        timeout = httpx2.Timeout(timeout_s, connect=CONNECT_S)
        try:
            with self._client.stream(
                method, self._url(path, root), content=content, headers=_JSON, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    raise self.status_error(response)
                return self.json_object(path, response)
        except httpx2.InvalidURL as error:
            raise UsageError(f"{self.base} is not the address of a server: {error}") from error
        except (httpx2.HTTPError, RuntimeError) as error:
            # A closed client raises RuntimeError.
            if self._closed:
                raise EngineClosed("the model was unloaded") from error
            raise self.connection_error(error) from error

    def json_object(self, request: str, response: httpx2.Response) -> dict[str, Any]:
        """Return the JSON object in the body of a reply. Raises NetworkError for another body."""
        try:
            value = json.loads(read_body(response, _MAX_BODY_BYTES))
        except ValueError as error:
            raise self.unexpected_reply(request, "invalid JSON") from error
        if not isinstance(value, dict):
            raise self.unexpected_reply(request, "JSON that is not an object")
        return value

    def lines(self, response: httpx2.Response) -> Iterator[str]:
        """Yield lines that end in LF or CRLF. Texts may contain other line ends of Unicode.

        Raises NetworkError for a line that is too long.
        """
        pending = bytearray()
        for piece in response.iter_bytes():
            pending += piece
            if b"\n" in piece:
                *complete, incomplete = bytes(pending).split(b"\n")
                yield from (line.decode("utf-8", "replace").rstrip("\r") for line in complete)
                pending = bytearray(incomplete)
            if len(pending) > _MAX_LINE_BYTES:
                raise self.unexpected_reply(
                    "the stream", f"a line of more than {_MAX_LINE_BYTES} bytes"
                )
        if pending:
            yield pending.decode("utf-8", "replace")

    def status_error(self, response: httpx2.Response) -> LocalchatError:
        """Return the error for a status other than 200."""
        text = read_body(response, _MAX_ERROR_BYTES).decode("utf-8", "replace")
        return error_from_status(response.status_code, text, self.base)

    def connection_error(self, error: Exception, *, partial: bool = False) -> NetworkError:
        """Return the error for a failed connection. partial: part of an answer was received."""
        failure = connection_failure(error, self.base, proxy=proxy_for(self.base))
        suffix = ", in the middle of an answer; the received part is kept" if partial else ""
        remotes = "`localchat config show` lists the remotes"
        hint = "\n".join(filter(None, (failure.hint, remotes)))
        return NetworkError(f"{failure.message}{suffix}", hint=hint, certain=failure.certain)

    def unexpected_reply(self, request: str, reply: str) -> NetworkError:
        """Return the error for a reply that does not follow the protocol."""
        return NetworkError(
            f"{self.base} answered {request} with {reply}",
            hint="is it an OpenAI-compatible server?",
        )

    def _url(self, path: str, root: bool = False) -> str:
        if root:
            return f"{self.base}/{path}"
        return f"{self.base}/v1/{path}"


def _encoded(body: Mapping[str, Any]) -> bytes:
    """Encode the JSON body of a request. Raises UsageError for lone surrogates, NaN and infinity."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise UsageError(f"this cannot be sent to a server: {error}") from error


def read_body(response: httpx2.Response, max_bytes: int) -> bytes:
    """Return the first `max_bytes` of the body."""
    body = bytearray()
    for piece in response.iter_bytes():
        body += piece
        if len(body) >= max_bytes:
            break
    return bytes(body[:max_bytes])


def base_url(url: str) -> str:
    """Return the scheme, host and path of a server, without /v1 and the route. Raises UsageError."""
    text = url.strip().rstrip("/")
    if "://" not in text:
        text = f"http://{text}"
    if not text.startswith(("http://", "https://")):
        raise UsageError(
            f"{url!r} is not the address of a server", hint="as in http://127.0.0.1:8000"
        )
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise UsageError(
            "the address of a server must not contain a name or a password",
            hint="set `key_env` or `key_file` of the remote instead",
        )
    try:
        port = urlsplit(text).port
    except ValueError as error:
        raise UsageError(f"{url!r} is not the address of a server: {error}") from error
    if port == 0:
        raise UsageError(f"{url!r} is not the address of a server: its port is 0")
    return _ROUTE.sub("", text).rstrip("/")
