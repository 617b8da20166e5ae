"""Error formats: writes an API error in the shape of the client's protocol.

The path and Anthropic's version header decide on the protocol, so that every refusal (a missing key, a body
that is not JSON, an unknown route) has the shape that the client expects.
"""

from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from localchat.server.errors import ApiError, PromptTooLong
from localchat.server.middleware.access_log import (
    is_anthropic,
    is_ollama,
    normalize_path,
    request_id,
)


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error as a response to a request."""
    if isinstance(error, PromptTooLong):
        error.param = _PROMPT_FIELDS.get(normalize_path(scope["path"]), error.param)
    if is_anthropic(scope):
        body = anthropic_error(error, request_id(scope))
    elif is_ollama(scope["path"]):
        body = msgspec.json.encode({"error": error.message})
    else:
        body = openai_error(error)
    return Response(
        body, error.status, headers={"content-type": "application/json", **error.headers}
    )


def openai_error(error: ApiError) -> bytes:
    """An error as JSON, for a response or for the last event of a stream."""
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
    """An error as JSON, for a response or for the last event of a stream."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, PromptTooLong):
        # Anthropic's clients recognise this sentence and shorten the conversation when they read it.
        message = "prompt is too long"
        if error.prompt_tokens and error.context_tokens:
            message += f": {error.prompt_tokens} tokens > {error.context_tokens} maximum"
    body = {"type": kind, "message": message}
    return msgspec.json.encode({"type": "error", "error": body, "request_id": id_})


_PROMPT_FIELDS: Final = {
    "/completions": "prompt",
    "/completion": "prompt",
    "/responses": "input",
}
"""The field that is too long, by path, where it is not `messages`."""
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
