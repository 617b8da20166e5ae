"""Exception handlers of the application: every exception becomes an error response and is counted."""

import logging
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from localchat.errors import LocalchatError
from localchat.server.error_formats import error_response
from localchat.server.errors import ApiError, internal_error, to_api_error
from localchat.server.middleware.access_log import normalize_path
from localchat.server.state import service_of

log = logging.getLogger("localchat.server")

_BATCH_ROUTES: Final = ("/files", "/batches")
"""OpenAI's routes for batches, which this server does not have."""


def _respond(request: Request, error: ApiError) -> Response:
    service_of(request).metrics.count_error(error.code or "error", error.status)
    return error_response(error, request.scope)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Errors that a route raised for the client."""
    assert isinstance(error, ApiError)
    if isinstance(error.__cause__, LocalchatError) and error.kind == "server_error":
        _log_error(error.__cause__)
    return _respond(request, error)


async def on_localchat_error(request: Request, error: Exception) -> Response:
    """Errors of engines and pool."""
    assert isinstance(error, LocalchatError)
    api_error = to_api_error(error)
    if api_error.status >= 500:
        _log_error(error)
    return _respond(request, api_error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, which the router refuses."""
    assert isinstance(error, HTTPException)
    path = _original_path(request)[:200]
    method = request.method
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return _respond(
            request,
            ApiError(
                405,
                "method_not_allowed",
                f"{path} does not support {method}; it supports {allowed}.",
                headers={"allow": allowed},
            ),
        )
    if error.status_code == 404:
        message = f"There is no route {path}."
        if normalize_path(path).startswith(_BATCH_ROUTES):
            message += " To answer a file of requests, use the command `localchat batch`."
        return _respond(request, ApiError(404, None, message, kind="not_found_error"))
    return _respond(request, ApiError(error.status_code, None, error.detail))


def _original_path(request: Request) -> str:
    """The path as the client wrote it, before the AccessLogMiddleware normalized it."""
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    return raw.decode("ascii", "replace")


async def on_any_exception(request: Request, error: Exception) -> Response:
    """Any other exception: a bug. The server logs its traceback."""
    return _respond(request, internal_error())


async def on_client_disconnect(request: Request, error: Exception) -> Response:
    """The client left before its request was complete. The response goes only to the log."""
    return Response(status_code=499)


def _log_error(error: LocalchatError) -> None:
    """Log the full message, which may contain paths that clients must not see."""
    log.error("%s: %s", error.code, error.message)


HANDLERS: Final = {
    ApiError: on_api_error,
    LocalchatError: on_localchat_error,
    HTTPException: on_http_exception,
    ClientDisconnect: on_client_disconnect,
    Exception: on_any_exception,
}
