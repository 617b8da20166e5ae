"""Connections to a server on another machine: bounded in time and size, cut when nobody listens any more."""

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from localchat.engine.remote.errors import refusal_of
from localchat.errors import EngineClosed, LocalchatError, NetworkError, UsageError

CONNECT_S: Final = 10.0
ASK_S: Final = 30.0
"""Patience with a question that needs no model."""
_MOST_LINE_BYTES: Final = 16 << 20
_MOST_BYTES: Final = 64 << 20
_MOST_REFUSAL_BYTES: Final = 64 << 10
_CONNECTED: Final = ("connect_tcp.complete", "start_tls.complete")


class RemoteCall:
    """One request under way, that another thread may end: in whatever it waits for, the server sees the
    connection close at once. `gone`: whether that was done."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self._lock = threading.Lock()
        self._line: Any = None

    def trace(self, name: str, info: Mapping[str, Any]) -> None:
        """Told of each step by the HTTP library; the connection is known from its first one on."""
        if name.endswith(_CONNECTED):
            with self._lock:
                self._line = info["return_value"]
            if self.gone.is_set():
                self.hang_up()

    def hang_up(self) -> None:
        self.gone.set()
        with self._lock:
            line = self._line
        if line is None:
            return
        try:
            # Closing alone leaves a thread that reads, and with it the connection, as they are.
            line.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already


class RemoteClient:
    """What can be asked of one server. `base`: its address as it is shown. Raises UsageError for an address or
    a key that cannot be one; neither is ever repeated where it could hold a secret."""

    def __init__(self, url: str, key: str, silence_s: float) -> None:
        self.base = base_of(url)
        headers = {"User-Agent": "localchat", "Accept-Encoding": "identity"}
        if key:
            if not (key.isascii() and key.isprintable()) or " " in key:
                raise UsageError(
                    f"the key for {self.base} holds characters that no key has",
                    hint="one line, without blanks; `key_env` or `key_file` of the remote names it",
                )
            headers["Authorization"] = f"Bearer {key}"
        self._closed = False
        self._client = httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(silence_s, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
            follow_redirects=False,
        )

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._client.close()

    def stream(
        self, path: str, body: Mapping[str, Any], call: RemoteCall, *, root: bool = False
    ) -> AbstractContextManager[httpx2.Response]:
        """POST, on a connection of its own. Raises what httpx2 raises."""
        extensions = {"trace": call.trace}
        return self._client.stream("POST", self._url(path, root), json=body, extensions=extensions)

    def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        root: bool = False,
        patience_s: float = ASK_S,
    ) -> dict[str, Any]:
        """GET, or POST a body; the JSON object that comes back. Raises NetworkError, ModelMissing, UsageError,
        ContextExceeded, EngineClosed."""
        method = "GET" if body is None else "POST"
        timeout = httpx2.Timeout(patience_s, connect=CONNECT_S)
        try:
            with self._client.stream(
                method, self._url(path, root), json=body, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    raise self.refusal(response)
                found = json.loads(whole(response, _MOST_BYTES))
        except httpx2.InvalidURL as problem:
            raise UsageError(f"{self.base} is no address of a server: {problem}") from problem
        except (httpx2.HTTPError, RuntimeError) as problem:  # RuntimeError: the client was closed
            if self._closed:
                raise EngineClosed("the engine was closed") from problem
            raise self.lost(problem) from problem
        except ValueError as problem:
            raise self.odd(path, "what is no JSON") from problem
        if not isinstance(found, dict):
            raise self.odd(path, "no JSON object")
        return found

    def lines(self, response: httpx2.Response) -> Iterator[str]:
        """Lines that end in LF or CRLF and in nothing else: texts hold the other ends of lines that Unicode
        knows. Raises NetworkError for one without end."""
        pending = bytearray()
        for piece in response.iter_bytes():
            pending += piece
            if b"\n" in piece:
                *ended, rest = bytes(pending).split(b"\n")
                yield from (line.decode("utf-8", "replace").rstrip("\r") for line in ended)
                pending = bytearray(rest)
            if len(pending) > _MOST_LINE_BYTES:
                raise self.odd("the stream", f"a line of more than {_MOST_LINE_BYTES} bytes")
        if pending:
            yield pending.decode("utf-8", "replace")

    def refusal(self, response: httpx2.Response) -> LocalchatError:
        """Our error for a status other than 200."""
        text = whole(response, _MOST_REFUSAL_BYTES).decode("utf-8", "replace")
        return refusal_of(response.status_code, text, self.base)

    def lost(self, problem: Exception, *, begun: bool = False) -> NetworkError:
        """The connection failed. `begun`: after part of an answer."""
        what = " in the middle of its answer; what came is kept" if begun else ""
        return NetworkError(
            f"the connection to {self.base} failed{what} ({type(problem).__name__}: {problem})",
            hint="is the server running, and is its address right? `localchat config show` has the remotes",
        )

    def odd(self, what: str, found: str) -> NetworkError:
        """The server speaks another language."""
        return NetworkError(
            f"{self.base} answered {what} with {found}",
            hint="an OpenAI-compatible server is expected there",
        )

    def _url(self, path: str, root: bool) -> str:
        return f"{self.base}/{path}" if root else f"{self.base}/v1/{path}"


def whole(response: httpx2.Response, most_bytes: int) -> bytes:
    """The body, or its beginning where it is longer."""
    found = bytearray()
    for piece in response.iter_bytes():
        found += piece
        if len(found) >= most_bytes:
            break
    return bytes(found[:most_bytes])


def base_of(url: str) -> str:
    """Scheme, host and path of a server, without /v1. Raises UsageError."""
    text = url.strip().rstrip("/")
    if "://" not in text:
        text = f"http://{text}"
    if not text.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is no address of a server", hint="as in http://127.0.0.1:8000")
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise UsageError(
            "the address of a server cannot hold a name or a password",
            hint="keys come from `key_env` or `key_file` of the remote",
        )
    try:
        port = urlsplit(text).port
    except ValueError as problem:
        raise UsageError(f"{url!r} is no address of a server: {problem}") from problem
    if port == 0:
        raise UsageError(f"{url!r} is no address of a server: its port is 0")
    return text.removesuffix("/v1").rstrip("/")
