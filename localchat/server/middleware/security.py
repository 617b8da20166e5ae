"""Who may ask at all: decided for every request from its headers alone, before anything is read or done.

A web page that its visitor opened can send requests to this machine. It cannot choose the Host header, unless
its own name was made to point here (DNS rebinding), and its Origin tells on it; so both must be known. Names
that end in .local or the like are nobody's proof. Pure ASGI, because wrappers that sit between hide when a
client leaves.
"""

import hmac
import ipaddress
import re
from collections.abc import Callable, Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from localchat.errors import UsageError
from localchat.server.config import ServerConfig
from localchat.server.error_formats import response
from localchat.server.errors import ApiError

_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_ORIGIN: Final = re.compile(
    r"null|[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._*-]+)(:([0-9]{1,5}|\*))?"
)
_NAME: Final = re.compile(r"[a-z0-9_-][a-z0-9._-]*")
PRIVATE: Final = "/localchat/"
"""Routes of the owner's own programs, which check a token of their own."""
_OPEN: Final = frozenset({"/", "/health"})
_METHODS: Final = "GET, HEAD, POST, OPTIONS"


def checked_origins(given: Sequence[str]) -> tuple[str, ...]:
    """Origins as browsers send them, `*` in place of host or port. Raises UsageError for what no page has: it
    would open nothing, and nobody would know why."""
    made = tuple(origin.lower().removesuffix("/") for origin in given)
    for origin in made:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"--allow-origin {origin!r}: no page has such an origin",
                hint="scheme://host or scheme://host:port, with * in place of host or port: "
                "http://localhost:*, https://app.example.org, vscode-webview://*",
            )
    return made


def checked_names(given: Sequence[str]) -> tuple[str, ...]:
    """Names and addresses for the Host header. Raises UsageError for what is neither."""
    made = tuple(name.lower() for name in given)
    for name in made:
        if not _NAME.fullmatch(name) and not _is_address(name.strip("[]")):
            raise UsageError(
                f"--allow-host {name!r}: this is no name of a machine",
                hint="the name or address alone, without http:// and without a port: box.lan",
            )
    return made


class SecurityMiddleware:
    """`on_refused` is told of every refusal."""

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
            self._check_host(headers)
            allowed = self._check_origin(headers)
            if scope["method"] == "OPTIONS":
                await self._preflight(headers, allowed)(scope, receive, send)
                return
            if scope["path"] not in _OPEN and not scope["path"].startswith(PRIVATE):
                scope["localchat.key"] = self._check_key(headers)
        except ApiError as error:
            self._on_refused(error)
            if (
                allowed is None or scope["method"] == "OPTIONS"
            ):  # a preflight's refusal names no page
                allowed = None
                error.headers["vary"] = "Origin"
            await response(error, scope)(scope, receive, _with_origin(send, allowed))
            return
        await self._app(scope, receive, _with_origin(send, allowed))

    # ------------------------------------------------------------------------ Host and Origin

    def _check_host(self, headers: Headers) -> None:
        given = headers.getlist("host")
        if len(given) != 1 or not self._is_ours(given[0]):
            shown = ", ".join(given)[:100]
            raise ApiError(
                403,
                "host_not_allowed",
                f"The Host header is {shown!r}, which is no name of this server; if it should be one, start "
                "it with --allow-host NAME.",
                kind="permission_error",
            )

    def _is_ours(self, host: str) -> bool:
        found = _HOST.fullmatch(host)
        if found is None or (found[2] is not None and int(found[2]) > 65535):
            return False
        name = found[1].lower().strip("[]")
        if name in self._hosts:
            return True
        return self._config.any_address and _is_address(name)

    def _check_origin(self, headers: Headers) -> str | None:
        """The Origin, where there is one and it may ask. Raises ApiError."""
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
        """What a browser asks before a page may. Pages of a public network get no access to a private
        one."""
        if origin is None or "access-control-request-private-network" in headers:
            raise ApiError(
                403,
                "origin_not_allowed",
                "No page may ask this.",
                kind="permission_error",
            )
        wanted = headers.get("access-control-request-headers", "")
        return Response(
            status_code=204,
            headers={
                "access-control-allow-origin": origin,
                "access-control-allow-methods": _METHODS,
                "access-control-allow-headers": wanted or "content-type, authorization",
                "access-control-max-age": "600",
                "vary": "Origin",
            },
        )

    # ------------------------------------------------------------------------ keys

    def _check_key(self, headers: Headers) -> str:
        """The key that was given, empty where none is asked for: then anything is accepted, because some
        clients always send one. Raises ApiError."""
        keys = self._config.api_keys
        if not keys:
            return ""
        for given in _given_keys(headers):
            # Every key is compared, so that the time tells nothing.
            if [key for key in keys if hmac.compare_digest(key.encode(), given.encode())]:
                return given
        raise ApiError(
            401,
            "invalid_api_key",
            "This server wants an API key: Authorization: Bearer KEY.",
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
    """An Origin where `*` stands for one host or port."""
    escaped = re.escape(origin.rstrip("/"))
    if escaped.endswith(r":\*"):
        escaped = escaped.removesuffix(r"\*") + "[0-9]{1,5}"
    return re.compile(escaped.replace(r"\*", r"[A-Za-z0-9._-]+"))


def _with_origin(send: Send, origin: str | None) -> Send:
    """Lets a browser hand the answer to the page that was allowed to ask; None: no page asked."""
    if origin is None:
        return send

    async def sending(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            headers = message.setdefault("headers", [])
            assert isinstance(headers, list)
            headers += [
                (b"access-control-allow-origin", origin.encode()),
                (b"access-control-expose-headers", b"x-request-id, retry-after"),
                (b"vary", b"Origin"),
            ]
        await send(message)

    return sending  # type: ignore[return-value]
