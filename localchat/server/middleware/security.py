"""Security middleware: checks Host, Origin and API key of every request.

It does so before anything is read or done. A web page in a visitor's browser can send requests to this
machine. It cannot choose the Host header, unless its own name was made to point here (DNS rebinding), and its
Origin identifies it; so both must be known. A name that ends in .local proves nothing. Pure ASGI, because
Starlette's wrapper for middleware hides that a client left.
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
"""Prefix of the private routes, which check a token of their own."""
_OPEN: Final = frozenset({"/", "/health"})
_PROBES: Final = frozenset({"/", "/health", "/metrics"})
_METHODS: Final = "GET, HEAD, POST, DELETE, OPTIONS"
_KEY_VARIABLE: Final = "LOCALCHAT_API_KEY"
_MIN_KEY_LENGTH: Final = 8


def checked_origins(given: Sequence[str]) -> tuple[str, ...]:
    """Origins in the form that browsers send, with `*` in place of host or port. Raises UsageError for an
    origin that no page can have, which would otherwise never match without a word."""
    made = tuple(origin.lower().removesuffix("/") for origin in given)
    for origin in made:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"--allow-origin {origin!r} is not a valid origin",
                hint="scheme://host or scheme://host:port, with * in place of host or port: "
                "http://localhost:*, https://app.example.org, vscode-webview://*",
            )
    return made


def checked_names(given: Sequence[str]) -> tuple[str, ...]:
    """Names and addresses for the Host header, in lower case. Raises UsageError for anything else."""
    made = tuple(name.lower() for name in given)
    for name in made:
        if not _NAME.fullmatch(name) and not _is_address(name.strip("[]")):
            raise UsageError(
                f"--allow-host {name!r} is not a host name or an address",
                hint="the name or address alone, without http:// and without a port: box.lan",
            )
    return made


def read_keys(file: Path | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """API keys from a file and from the environment; empty if there are none.

    Never from the command line, which every program of the machine can read; for the same reason nobody but
    its owner may read the file. It has one key per line; lines that begin with # are comments. Raises
    FileMissing, UsageError.
    """
    keys = [environ[_KEY_VARIABLE]] if environ.get(_KEY_VARIABLE) else []
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
        text = file.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
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
    """Checks every request. `on_refused`: called with every refusal."""

    def __init__(
        self, app: ASGIApp, config: ServerConfig, on_refused: Callable[[ApiError], None]
    ) -> None:
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
            # The refusal of a preflight must not name the page, or the browser would take it as allowed.
            if allowed is None or scope["method"] == "OPTIONS":
                allowed = None
                error.headers["vary"] = "Origin"
            await error_response(error, scope)(scope, receive, _with_origin(send, allowed))
            return
        await self._app(scope, receive, _with_origin(send, allowed))

    # ------------------------------------------------------------------------ Host and Origin

    def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        if len(given) != 1 or not self._is_own_name(given[0]):
            shown = ", ".join(given)[:100]
            raise ApiError(
                403,
                "host_not_allowed",
                f"The Host header is {shown!r}, which is not a name of this server; to allow it, start "
                "the server with --allow-host NAME.",
                kind="permission_error",
            )

    def _is_own_name(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None or (found[2] is not None and int(found[2]) > 65535):
            return False
        name = found[1].lower().strip("[]")
        if name in self._hosts:
            return True
        return self._config.any_address and _is_address(name)

    def _check_origin(self, headers: Headers) -> str | None:
        """The allowed Origin; None if the request has none. Raises ApiError."""
        given = headers.getlist("origin")
        if given and (
            len(given) > 1 or not any(each.fullmatch(given[0]) for each in self._origins)
        ):
            raise ApiError(
                403,
                "origin_not_allowed",
                f"Requests from {', '.join(given)[:100]!r} are not allowed; to allow them, start the server "
                "with --allow-origin ORIGIN.",
                kind="permission_error",
            )
        if not given and headers.get("sec-fetch-site", "") == "cross-site":
            raise ApiError(
                403,
                "origin_not_allowed",
                "Requests from pages of other sites are not allowed.",
                kind="permission_error",
            )
        return given[0] if given else None

    def _preflight(self, headers: Headers, origin: str | None) -> Response:
        """The answer to a browser that checks if a page may send a request. Pages of a public network get no
        access to a private one."""
        if origin is None or "access-control-request-private-network" in headers:
            raise ApiError(
                403,
                "origin_not_allowed",
                "This cross-origin request is not allowed.",
                kind="permission_error",
            )
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

    # ------------------------------------------------------------------------ keys

    def _check_key(self, headers: Headers) -> str:
        """The key of the request. Raises ApiError.

        Empty if the server needs none: some clients always send one.
        """
        keys = self._config.api_keys
        if not keys:
            return ""
        for given in _given_keys(headers):
            # Every key is compared, so that the time reveals nothing.
            if [key for key in keys if hmac.compare_digest(key.encode(), given.encode())]:
                return given
        raise ApiError(
            401,
            "invalid_api_key",
            "This server requires an API key: Authorization: Bearer KEY.",
            kind="authentication_error",
            headers={"www-authenticate": "Bearer"},
        )


def _given_keys(headers: Headers) -> Sequence[str]:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    keys = [bearer.strip()] if scheme.lower() == "bearer" else []
    keys += [headers.get("x-api-key", ""), headers.get("api-key", "")]
    return [key for key in keys if key]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _pattern(origin: str) -> re.Pattern[str]:
    """A pattern for an Origin, in which `*` stands for one host or port."""
    escaped = re.escape(origin.rstrip("/"))
    if escaped.endswith(r":\*"):
        escaped = escaped.removesuffix(r"\*") + "[0-9]{1,5}"
    return re.compile(escaped.replace(r"\*", r"[A-Za-z0-9._-]+"))


def _with_origin(send: Send, origin: str | None) -> Send:
    """Add the headers that let a browser pass the response to an allowed page. None: not a page's request."""
    if origin is None:
        return send

    async def sending(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            headers = message.setdefault("headers", [])
            assert isinstance(headers, list)
            headers += [
                (b"access-control-allow-origin", origin.encode()),
                (
                    b"access-control-expose-headers",
                    b"x-request-id, retry-after, x-localchat-schema-relaxed, x-localchat-ignored",
                ),
                (b"vary", b"Origin"),
            ]
        await send(message)

    return sending  # type: ignore[return-value]
