"""Errors of the API: status, type, code and message, in the format of the client's protocol.

A failure that a retry cannot fix is never a 5xx without `x-should-retry: false`, because client libraries send
the request again three times. No message contains a path of this machine.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from localchat.errors import (
    ContextExceeded,
    DoesNotFit,
    EngineBusy,
    EngineClosed,
    EngineDied,
    LocalchatError,
    ModelInvalid,
    ModelMissing,
    NetworkError,
    TemplateError,
    UsageError,
)
from localchat.server.paths import is_anthropic, is_ollama, normalize_path, request_id

log = logging.getLogger("localchat.server")

_NO_RETRY: Final = {"x-should-retry": "false"}
_PROMPT_FIELDS: Final = {
    "/completions": "prompt",
    "/completion": "prompt",
    "/responses": "input",
}
"""Name of the prompt's field by path. `messages` for other paths."""
_ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_WORD: Final = re.compile(r"[a-z']+[,:;]?(?: |$)")
"""A word at the start of a message. Names of files and fields have other signs."""
_BATCH_ROUTES: Final = ("/files", "/batches")
"""OpenAI's routes for batches, which this server does not have."""


REFUSAL: Final = "localchat.refusal"
"""Key of the scope with the error of a refused request."""


class ApiError(Exception):
    """An error as the API reports it."""

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """kind: OpenAI's `type`. headers: additional headers of the response."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.kind = kind
        self.param = param
        self.headers = dict(headers or {})
        self.steps: Sequence[Mapping[str, object]] = ()
        """Ways to make room, for the extension field `x_localchat`."""

    @property
    def label(self) -> str:
        """The code for logs and metrics."""
        return self.code or "error"


class PromptTooLong(ApiError):
    """400: the prompt does not fit. Clients recognize the message word for word."""

    def __init__(
        self, prompt_tokens: int, context_tokens: int, answer_tokens: int, *, at_least: bool = False
    ) -> None:
        """An unknown number is 0 and left out. at_least: the prompt was not counted to its end."""
        sentence = f"This model's maximum context length is {context_tokens or 'exceeded'}"
        if context_tokens:
            sentence += " tokens"
        if context_tokens and prompt_tokens:
            sentence += ". However, you requested "
            if at_least:
                sentence += "at least "
            sentence += (
                f"{prompt_tokens + answer_tokens} tokens ({prompt_tokens} in the messages, "
                f"{answer_tokens} in the completion)"
            )
        super().__init__(
            400,
            "context_length_exceeded",
            f"{sentence}. Please reduce the length of the messages or completion.",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


def bad_request(
    message: str, *, param: str | None = None, code: str | None = "unsupported_value"
) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, code, message, param=param)


def missing_field(param: str, message: str = "") -> ApiError:
    """400: the request lacks a field. `message` replaces the usual sentence."""
    message = message or f"The field {param!r} is required."
    return bad_request(message, param=param, code="missing_required_parameter")


def required(value: str | None, param: str) -> str:
    """Return the value of a field. Raises ApiError if the request lacks it."""
    if value is None:
        raise missing_field(param)
    return value


def unavailable(message: str, code: str = "server_busy", retry_s: int = 1) -> ApiError:
    """503: the same request may succeed later."""
    headers = {"retry-after": str(retry_s)}
    return ApiError(503, code, message, kind="server_error", headers=headers)


def timed_out(seconds: float) -> ApiError:
    """504: the request exceeded the time limit."""
    message = f"The request took longer than {seconds:g} seconds and was cancelled."
    return _failure(504, "timeout", message)


def internal_error() -> ApiError:
    """500: a bug of ours. The client gets no details; the log has them."""
    return _failure(500, "internal_error", "Internal server error; see the server's log.")


def _failure(status: int, code: str, message: str) -> ApiError:
    """Return a failure of the server that a retry cannot fix."""
    return ApiError(status, code, message, kind="server_error", headers=_NO_RETRY)


def model_not_found(name: str) -> ApiError:
    """404: no model has this name."""
    if len(name) > 100:
        name = f"{name[:100]}…"
    message = f"The model {name!r} does not exist; GET /v1/models lists those that do."
    return ApiError(404, "model_not_found", message, param="model")


def to_api_error(error: LocalchatError, *, requested_tokens: int | None = None) -> ApiError:
    """Convert an error of ours. `requested_tokens`: length of the answer that the client requested."""
    match error:
        case ContextExceeded():
            return _too_long(error, requested_tokens)
        case TemplateError():
            return bad_request(_with_hint(error), param="messages", code="chat_template_error")
        case UsageError():
            field = error.details.get("field")
            if isinstance(field, str):
                return bad_request(_with_hint(error), param=field)
            return bad_request(_with_hint(error), code=None)
        case DoesNotFit():
            api_error = _failure(503, "does_not_fit", error.message)
            api_error.steps = error.steps
            return api_error
        case ModelInvalid() | ModelMissing():
            # The server has resolved the name, so the files have changed since.
            message = "The model is missing or damaged; see the server's log."
            return _failure(500, "model_invalid", message)
        case EngineDied():
            message = "The engine stopped unexpectedly and is restarting; try again."
            return unavailable(message, "engine_died")
        case EngineBusy():
            busy = unavailable(_sentence(error.message))
            retry_s = error.details.get("retry_after_s")
            if isinstance(retry_s, int):
                busy.headers["retry-after"] = str(retry_s)
            return busy
        case EngineClosed():
            return unavailable(_sentence(error.message), "model_unloaded")
        case NetworkError():
            return _upstream_error(error.details.get("status"))
    return internal_error()


def _upstream_error(status: object) -> ApiError:
    """Return the error for a failure of a remote server that this one forwards to.

    The log has its message, which might name machines that clients should not know. status: of its response;
    None without a response.
    """
    if status in (404, 405, 501):
        message = "The upstream server does not support this."
        return ApiError(501, "not_supported", message, headers=_NO_RETRY)
    if status == 429:
        return unavailable("The upstream server is overloaded.", "upstream_busy")
    message = "The connection to the upstream server failed"
    if isinstance(status, int):
        message = f"The upstream server answered with status {status}"
    error = _failure(502, "upstream_error", f"{message}; see this server's log.")
    if not isinstance(status, int) or status >= 500:
        error.headers.clear()  # a retry may succeed
    return error


def _too_long(error: ContextExceeded, requested_tokens: int | None) -> ApiError:
    context = error.details.get("context_tokens") or 0
    prompt = error.details.get("prompt_tokens") or 0
    assert isinstance(context, int) and isinstance(prompt, int)
    if error.details.get("embeds"):
        # Clients recognize the first sentence.
        sentence = f"This model's maximum context length is {context} tokens"
        message = f"{sentence}. {_with_hint(error)}"
        return bad_request(message, param="input", code="context_length_exceeded")
    at_least = bool(error.details.get("at_least"))
    too_long = PromptTooLong(prompt, context, max(1, requested_tokens or 1), at_least=at_least)
    too_long.steps = error.steps
    return too_long


def _with_hint(error: LocalchatError) -> str:
    message = _sentence(error.message)
    if error.hint:
        return f"{message} {_sentence(error.hint)}"
    return message


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    if not _WORD.match(text):
        return f"{text}."  # a URL, a file or a field keeps its case
    return f"{text[:1].upper()}{text[1:]}."


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the response to a request, in the format of its protocol.

    Path and headers decide, so that every refusal has the format that the client expects: a missing key, a
    body that is not JSON, an unknown route.
    """
    scope[REFUSAL] = error
    if isinstance(error, PromptTooLong):
        error.param = _PROMPT_FIELDS.get(normalize_path(scope["path"]), error.param)
    if is_anthropic(scope):
        body = anthropic_error(error, request_id(scope))
    elif is_ollama(scope["path"]):
        body = msgspec.json.encode({"error": error.message})
    else:
        body = openai_error(error)
    headers = {"content-type": "application/json", **error.headers}
    return Response(body, error.status, headers=headers)


def openai_error(error: ApiError) -> bytes:
    """Return the JSON of an error, for a response or the end of a stream."""
    body: dict[str, object] = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    if error.steps:
        body["x_localchat"] = {"steps": error.steps}
    return msgspec.json.encode({"error": body})


def anthropic_error(error: ApiError, id_: str) -> bytes:
    """Return the JSON of an error, for a response or the end of a stream."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    message = error.message
    if isinstance(error, PromptTooLong):
        # Anthropic's clients recognize this sentence and shorten the conversation.
        message = "prompt is too long"
        if error.prompt_tokens and error.context_tokens:
            message += f": {error.prompt_tokens} tokens > {error.context_tokens} maximum"
    body = {"type": _ANTHROPIC_KINDS.get(error.status, default), "message": message}
    return msgspec.json.encode({"type": "error", "error": body, "request_id": id_})


ExceptionHandlers: TypeAlias = Mapping[Any, Callable[[Request, Any], Awaitable[Response]]]


def exception_handlers(count: Callable[[ApiError], None]) -> ExceptionHandlers:
    """Return Starlette's handlers: every exception becomes an error response. `count` gets each error."""

    def respond(request: Request, error: ApiError) -> Response:
        count(error)
        return error_response(error, request.scope)

    async def on_api_error(request: Request, error: ApiError) -> Response:
        cause = error.__cause__
        if isinstance(cause, LocalchatError) and error.kind == "server_error":
            _log_error(cause)
        return respond(request, error)

    async def on_localchat_error(request: Request, error: LocalchatError) -> Response:
        api_error = to_api_error(error)
        if api_error.status >= 500:
            _log_error(error)
        return respond(request, api_error)

    async def on_http_exception(request: Request, error: HTTPException) -> Response:
        return respond(request, _routing_error(request, error))

    async def on_client_disconnect(request: Request, error: ClientDisconnect) -> Response:
        # The client left before its request was complete: the response goes only to the log.
        return Response(status_code=499)

    async def on_bug(request: Request, error: Exception) -> Response:
        # uvicorn logs the traceback.
        return respond(request, internal_error())

    return {
        ApiError: on_api_error,
        LocalchatError: on_localchat_error,
        HTTPException: on_http_exception,
        ClientDisconnect: on_client_disconnect,
        Exception: on_bug,
    }


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    """Convert the refusal of an unknown route or method."""
    # The path as the client sent it, before the AccessLogMiddleware normalized it.
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    path = raw.decode("ascii", "replace")[:200]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} does not support {request.method}; it supports {allowed}."
        return ApiError(405, "method_not_allowed", message, headers={"allow": allowed})
    if error.status_code == 404:
        message = f"There is no route {path}."
        if normalize_path(path).startswith(_BATCH_ROUTES):
            message += " To answer a file of requests, use the command `localchat batch`."
        elif is_ollama(path):
            message += " OpenAI's API is at /v1."
        return ApiError(404, None, message, kind="not_found_error")
    return ApiError(error.status_code, None, error.detail)


def _log_error(error: LocalchatError) -> None:
    """Log the full message, which may contain paths that clients must not see."""
    log.error("%s: %s", error.code, log_text(error))


def log_text(error: LocalchatError) -> str:
    """Return the message and the hint of an error on one line."""
    return "; ".join(filter(None, (error.message, *error.hint.split("\n"))))
