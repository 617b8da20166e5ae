"""How an error is written: each protocol has a shape of its own, and a client reads no other.

Which protocol it is follows from the path alone, so that whatever refuses a request (a missing key, a body
that is no JSON, a route that is not there) answers in the words of the one who asks.
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


def response(error: ApiError, scope: Scope) -> Response:
    """The error as a response to this request."""
    if isinstance(error, PromptTooLong):
        error.param = _PROMPTS.get(normalize_path(scope["path"]), error.param)
    if is_anthropic(scope["path"]):
        body = anthropic_error(error, request_id(scope))
    elif is_ollama(scope["path"]):
        body = msgspec.json.encode({"error": error.message})
    else:
        body = openai_error(error)
    return Response(
        body, error.status, headers={"content-type": "application/json", **error.headers}
    )


def openai_error(error: ApiError) -> bytes:
    """JSON, whole or as the last event of a stream."""
    told = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    return msgspec.json.encode({"error": told})


def anthropic_error(error: ApiError, request: str) -> bytes:
    """JSON, whole or as the last event of a stream. `request`: its number."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, PromptTooLong):
        # Their clients know this sentence by heart, and shorten the conversation when they read it.
        message = "prompt is too long"
        if error.prompt_tokens and error.context_tokens:
            message += f": {error.prompt_tokens} tokens > {error.context_tokens} maximum"
    told = {"type": kind, "message": message}
    return msgspec.json.encode({"type": "error", "error": told, "request_id": request})


_PROMPTS: Final = {
    "/completions": "prompt",
    "/completion": "prompt",
    "/responses": "input",
}
"""What is too long, by the path, where it is not called `messages`."""
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
