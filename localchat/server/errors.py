"""API errors: maps our errors to a status, a type, a code and a message. error_formats.py writes them per
protocol.

A failure that a retry cannot cure is never a 5xx without `x-should-retry: false`, because client libraries
try a 5xx three times. No message contains a path of this machine.
"""

from collections.abc import Mapping, Sequence
from typing import Final

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

INVALID: Final = "invalid_request_error"
_NO_RETRY: Final = {"x-should-retry": "false"}


class ApiError(Exception):
    """An error as the API reports it. `headers`: additional headers of the response."""

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        steps: Sequence[Mapping[str, object]] = (),
    ) -> None:
        """`steps`: what would make room, for the extension field `x_localchat`."""
        super().__init__(message)
        self.steps = tuple(steps)
        self.status = status
        self.code = code
        self.message = message
        self.kind = kind
        self.param = param
        self.headers = dict(headers or {})


class PromptTooLong(ApiError):
    """400: the prompt does not fit. Clients recognise its message word for word; unknown numbers (0) are left
    out.

    at_least: the prompt was so long that it was not counted to its end.
    """

    def __init__(
        self, prompt_tokens: int, context_tokens: int, answer_tokens: int, *, at_least: bool = False
    ) -> None:
        sentence = f"This model's maximum context length is {context_tokens or 'exceeded'}"
        if context_tokens:
            sentence += " tokens"
        if context_tokens and prompt_tokens:
            sentence += (
                f". However, you requested {'at least ' if at_least else ''}{prompt_tokens + answer_tokens} "
                f"tokens ({prompt_tokens} in the messages, {answer_tokens} in the completion)"
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
    """400: the request lacks a field. `message`: what to say instead of the usual sentence."""
    message = message or f"The field {param!r} is required."
    return bad_request(message, param=param, code="missing_required_parameter")


def unavailable(message: str, code: str = "server_busy", retry_s: int = 1) -> ApiError:
    """503: the same request may succeed later."""
    headers = {"retry-after": str(retry_s)}
    return ApiError(503, code, message, kind="server_error", headers=headers)


def timed_out(seconds: float) -> ApiError:
    """504: the request exceeded the time limit."""
    message = f"The request took longer than {seconds:g} seconds and was cancelled."
    return ApiError(504, "timeout", message, kind="server_error", headers=_NO_RETRY)


def internal_error() -> ApiError:
    """500: a bug of ours. The log has the details, the client gets none."""
    message = "Internal server error; see the server's log."
    return ApiError(500, "internal_error", message, kind="server_error", headers=_NO_RETRY)


def model_not_found(name: str) -> ApiError:
    """404: no model has this name."""
    shown = name if len(name) <= 100 else f"{name[:100]}…"
    message = f"The model {shown!r} does not exist; GET /v1/models lists those that do."
    return ApiError(404, "model_not_found", message, param="model")


def to_api_error(error: LocalchatError, *, requested_tokens: int | None = None) -> ApiError:
    """The API error for one of ours. `requested_tokens`: the longest answer that the client asked for."""
    match error:
        case ContextExceeded():
            return _too_long(error, requested_tokens)
        case TemplateError():
            return bad_request(_with_hint(error), param="messages", code="chat_template_error")
        case UsageError():
            return _engine_refusal(error)
        case ModelMissing():
            return model_not_found(str(error.details.get("model") or error.message))
        case DoesNotFit():
            return ApiError(
                503,
                "does_not_fit",
                error.message,
                kind="server_error",
                headers=_NO_RETRY,
                steps=error.steps,
            )
        case ModelInvalid():
            message = "The model file cannot be used; see the server's log."
            return ApiError(500, "model_invalid", message, kind="server_error", headers=_NO_RETRY)
        case EngineDied():
            return unavailable(
                "The engine stopped unexpectedly and is restarting; try again.", "engine_died"
            )
        case EngineBusy():
            retry = error.details.get("retry_after_s")
            return unavailable(
                _sentence(error.message), retry_s=retry if isinstance(retry, int) else 1
            )
        case EngineClosed():
            return unavailable(_sentence(error.message), "model_unloaded")
        case NetworkError():
            return _upstream(error.details.get("status"))
    return internal_error()


def _engine_refusal(error: UsageError) -> ApiError:
    """A refusal by the engine, with the wrong field if it named one."""
    field = error.details.get("field")
    if not isinstance(field, str):
        return bad_request(_with_hint(error), code=None)
    return bad_request(_with_hint(error), param=field)


def _upstream(status: object) -> ApiError:
    """A remote server that this one forwards to failed. Its message goes to the log only, as it may name
    machines that clients should not know. `status`: of its response, if there was one."""
    if status in (404, 405, 501):
        message = "The upstream server does not support this."
        return ApiError(501, "not_supported", message, headers=_NO_RETRY)
    if status == 429:
        return unavailable("The upstream server is overloaded.", "upstream_busy")
    message = "The connection to the upstream server failed"
    if isinstance(status, int):
        message = f"The upstream server answered with status {status}"
    may_retry = not isinstance(status, int) or status >= 500
    headers = {} if may_retry else _NO_RETRY  # a wrong key, for instance, stays wrong
    return ApiError(
        502,
        "upstream_error",
        f"{message}; see this server's log.",
        kind="server_error",
        headers=headers,
    )


def _too_long(error: ContextExceeded, requested: int | None) -> ApiError:
    context = error.details.get("context_tokens") or 0
    prompt = error.details.get("prompt_tokens") or 0
    assert isinstance(context, int) and isinstance(prompt, int)
    if error.details.get("embeds"):
        # Clients recognize the first sentence.
        sentence = f"This model's maximum context length is {context} tokens"
        message = f"{sentence}. {_with_hint(error)}"
        return ApiError(400, "context_length_exceeded", message, param="input")
    at_least = bool(error.details.get("at_least"))
    too_long = PromptTooLong(prompt, context, max(1, requested or 1), at_least=at_least)
    too_long.steps = error.steps
    return too_long


def _with_hint(error: LocalchatError) -> str:
    message = _sentence(error.message)
    if error.hint:
        return f"{message} {_sentence(error.hint)}"
    return message


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    if text.startswith(("http://", "https://")):
        return f"{text}."  # a URL keeps its case
    return f"{text[:1].upper()}{text[1:]}."
