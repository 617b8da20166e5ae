"""Security middleware: checks Host, Origin and API key of every request, before its body is read.

A web page in the user's browser can send requests to this machine. It cannot choose the Host header, unless its
own name points here (DNS rebinding), and its Origin identifies it. Both must therefore be allowed. A name that
ends in .local proves nothing. Pure ASGI, because Starlette's wrapper for middleware hides disconnects.
"""

import hmac
import ipaddress
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from localchat.config.paths import read_input
from localchat.errors import FileMissing, UsageError
from localchat.server.config import ServerConfig
from localchat.server.errors import ApiError, error_response, unavailable
from localchat.server.uvicorn_http import PROBES_ONLY

_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_ORIGIN: Final = re.compile(
    r"null|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._*-]+)(:([0-9]{1,5}|\*))?"
)
_NAME: Final = re.compile(r"[a-z0-9_-][a-z0-9._-]*")
PRIVATE: Final = "/localchat/"
"""Prefix of the private routes. They check a token of their own."""
_OPEN: Final = frozenset({"/", "/health"})
_PROBES: Final = frozenset({"/", "/health", "/metrics"})
_METHODS: Final = "GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED: Final = (
    b"x-request-id, request-id, retry-after, x-should-retry, x-localchat-schema-relaxed, "
    b"x-localchat-ignored, x-localchat-context-tokens"
)
"""Headers of responses that pages may read. OpenAI's and Anthropic's libraries need the first four."""
_KEY_VARIABLE: Final = "LOCALCHAT_API_KEY"
_MIN_KEY_LENGTH: Final = 8
_MAX_FILE_BYTES: Final = 1_000_000


def checked_origins(values: Sequence[str]) -> tuple[str, ...]:
    """Return Origins as browsers send them; `*` may replace host or port.

    Raises UsageError for an origin that no page can have, because it would never match.
    """
    origins = tuple(origin.lower().removesuffix("/") for origin in values)
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"--allow-origin {origin!r} is not a valid origin",
                hint="scheme://host or scheme://host:port, with * in place of host or port: "
                "http://localhost:*, https://app.example.org, vscode-webview://*",
            )
    return origins


def checked_names(values: Sequence[str]) -> tuple[str, ...]:
    """Return names and addresses for the Host header, in lower case. Raises UsageError for anything else."""
    names = tuple(name.lower() for name in values)
    for name in names:
        if not _NAME.fullmatch(name) and not _is_address(name.strip("[]")):
            raise UsageError(
                f"--allow-host {name!r} is not a host name or an address",
                hint="the name or address alone, without http:// and without a port: box.lan",
            )
    return names


def read_keys(file: Path | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Read the API keys of a file and of the environment.

    Keys never come from the command line, because every program of the machine can read it. For the same
    reason only its owner may read the file. It has one key per line; lines that start with # are comments.
    Raises FileMissing, UsageError.
    """
    keys = []
    if key := environ.get(_KEY_VARIABLE):
        keys.append(key)
    if file is not None:
        keys += _keys_in_file(file)
    for key in keys:
        if len(key) < _MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                "an API key is too short or contains characters that a header cannot hold",
                hint=f"at least {_MIN_KEY_LENGTH} letters and digits; for a new one: openssl rand -hex 24",
            )
    return tuple(dict.fromkeys(keys))


def _keys_in_file(file: Path) -> list[str]:
    try:
        status = file.stat()
        # Editors on Windows write a byte order mark.
        text = read_input(file, _MAX_FILE_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise FileMissing(f"the API key file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the API key file {file} is not a text file") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(
            f"other users of this machine can read the API keys in {file}", hint=f"chmod 600 {file}"
        )
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"there is no API key in {file}", hint="one per line")
    return keys


class SecurityMiddleware:
    """Checks every request."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, on_refused: Callable[[ApiError], None]
    ) -> None:
        """`on_refused` gets the error of every refusal."""
        self._app = app
        self._config = config
        self._on_refused = on_refused
        self._hosts = config.host_names
        self._origins = [_pattern(origin) for origin in config.origins]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        allowed = None
        try:
            if scope.get("state", {}).get(PROBES_ONLY) and scope["path"] not in _PROBES:
                error = unavailable("Too many connections are open.")
                error.headers["connection"] = "close"
                raise error
            self._check_host(headers)
            allowed = self._check_origin(headers)
            if scope["method"] == "OPTIONS":
                await self._preflight(headers, allowed)(scope, receive, send)
                return
            if scope["path"] not in _OPEN and not scope["path"].startswith(PRIVATE):
                scope["localchat.key"] = self._check_key(headers)
        except ApiError as error:
            self._on_refused(error)
            # If the refusal of a preflight named the page, the browser would treat the request as allowed.
            if allowed is None or scope["method"] == "OPTIONS":
                allowed = None
                error.headers["vary"] = "Origin"
            await error_response(error, scope)(scope, receive, _with_origin(send, allowed))
            return
        await self._app(scope, receive, _with_origin(send, allowed))

    def _check_host(self, headers: Headers) -> None:
        """Reject a page whose own name points to this machine. Raises ApiError."""
        hosts = headers.getlist("host")
        if not hosts:
            # Only HTTP/1.0 allows this, and every browser sends a Host header.
            return
        if len(hosts) != 1 or not self._is_own_name(hosts[0]):
            raise _forbidden(
                "host_not_allowed",
                f"The Host header is {', '.join(hosts)[:100]!r}, which is not a name of this server; to allow "
                "it, start the server with --allow-host NAME.",
            )

    def _is_own_name(self, host: str) -> bool:
        match = _HOST.fullmatch(host)
        if match is None or (match[2] is not None and int(match[2]) > 65535):
            return False
        name = match[1].lower().strip("[]")
        if name in self._hosts:
            return True
        return self._config.any_address and _is_address(name)

    def _check_origin(self, headers: Headers) -> str | None:
        """Return the allowed Origin, None for a request without one. Raises ApiError."""
        origins = headers.getlist("origin")
        if len(origins) == 1 and any(pattern.fullmatch(origins[0]) for pattern in self._origins):
            return origins[0]
        if origins:
            raise _forbidden(
                "origin_not_allowed",
                f"Requests from {', '.join(origins)[:100]!r} are not allowed; to allow them, start the server "
                "with --allow-origin ORIGIN.",
            )
        if headers.get("sec-fetch-site", "") == "cross-site":
            message = "Requests from pages of other sites are not allowed."
            raise _forbidden("origin_not_allowed", message)
        return None

    def _preflight(self, headers: Headers, origin: str | None) -> Response:
        """Answer a browser that checks if a page may send a request.

        Pages of a public network get no access to a private one.
        """
        if origin is None and "access-control-request-method" not in headers:
            # HAProxy checks the health of a server with `OPTIONS /`.
            return Response(status_code=204, headers={"allow": _METHODS})
        if origin is None or "access-control-request-private-network" in headers:
            raise _forbidden("origin_not_allowed", "This cross-origin request is not allowed.")
        requested = headers.get("access-control-request-headers", "")
        return Response(
            status_code=204,
            headers={
                "access-control-allow-origin": origin,
                "access-control-allow-methods": _METHODS,
                "access-control-allow-headers": requested or "content-type, authorization",
                "access-control-max-age": "600",
                "vary": "Origin",
            },
        )

    def _check_key(self, headers: Headers) -> str:
        """Return the key of the request; empty if the server needs none. Raises ApiError."""
        keys = self._config.api_keys
        if not keys:
            return ""  # some clients always send a key
        for sent in _sent_keys(headers):
            # Compare every key, so that the time reveals nothing.
            if [key for key in keys if hmac.compare_digest(key.encode(), sent.encode())]:
                return sent
        raise ApiError(
            401,
            "invalid_api_key",
            "This server requires an API key: Authorization: Bearer KEY.",
            kind="authentication_error",
            headers={"www-authenticate": "Bearer"},
        )


def _forbidden(code: str, message: str) -> ApiError:
    return ApiError(403, code, message, kind="permission_error")


def _sent_keys(headers: Headers) -> Sequence[str]:
    keys = [headers.get("x-api-key", ""), headers.get("api-key", "")]
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        keys.insert(0, bearer.strip())
    return list(filter(None, keys))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _pattern(origin: str) -> re.Pattern[str]:
    """Return a pattern for an Origin. A `*` matches one host or port."""
    escaped = re.escape(origin.rstrip("/"))
    if escaped.endswith(r":\*"):
        escaped = escaped.removesuffix(r"\*") + "[0-9]{1,5}"
    return re.compile(escaped.replace(r"\*", r"[A-Za-z0-9._-]+"))


def _with_origin(send: Send, origin: str | None) -> Send:
    """Add the headers that let a browser pass the response to a page."""
    if origin is None:
        return send

    async def sending(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            headers = message.setdefault("headers", [])
            assert isinstance(headers, list)
            headers += [
                (b"access-control-allow-origin", origin.encode()),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"Origin"),
            ]
        await send(message)

    return sending  # type: ignore[return-value]
