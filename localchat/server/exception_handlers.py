"""What the router raises becomes an answer here, and is counted."""

import logging
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from localchat.errors import LocalchatError
from localchat.server.error_formats import response
from localchat.server.errors import ApiError, internal_error, to_api_error
from localchat.server.state import service_of

log = logging.getLogger("localchat.server")


def _answer(request: Request, error: ApiError) -> Response:
    service_of(request).metrics.count_error(error.code or "error", error.status)
    return response(error, request.scope)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if isinstance(error.__cause__, LocalchatError) and error.kind == "server_error":
        _tell(error.__cause__)
    return _answer(request, error)


async def on_localchat_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LocalchatError)
    told = to_api_error(error)
    if told.status >= 500:
        _tell(error)
    return _answer(request, told)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, which the router itself refuses."""
    assert isinstance(error, HTTPException)
    path, method = _asked_path(request)[:200], request.method
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return _answer(
            request,
            ApiError(
                405,
                "method_not_allowed",
                f"{path} does not take {method}, but {allowed}.",
                headers={"allow": allowed},
            ),
        )
    if error.status_code == 404:
        return _answer(
            request, ApiError(404, None, f"There is no {path} here.", kind="not_found_error")
        )
    return _answer(request, ApiError(error.status_code, None, error.detail))


def _asked_path(request: Request) -> str:
    """The path as the client wrote it, which the AccessLogMiddleware has put into one form since."""
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    return raw.decode("ascii", "replace")


async def on_any_exception(request: Request, error: Exception) -> Response:
    """The last line of defence; the server logs the trace."""
    return _answer(request, internal_error())


async def on_leaving(request: Request, error: Exception) -> Response:
    """The client left before its request was whole: nobody reads this."""
    return Response(status_code=499)


def _tell(error: LocalchatError) -> None:
    """The whole of it in the log: the client gets no paths."""
    log.error("%s: %s", error.code, error.message)


HANDLERS: Final = {
    ApiError: on_api_error,
    LocalchatError: on_localchat_error,
    HTTPException: on_http_exception,
    ClientDisconnect: on_leaving,
    Exception: on_any_exception,
}
