"""Errors that a remote server reports, by a status or inside a stream, as ours.

Each server words the error of a too long prompt in its own way. A number is used only if it is clear what it
counts, because a wrong number misleads more than none.
"""

import json
import re
from typing import Any, Final, NamedTuple

from localchat.engine.remote.server_timings import count
from localchat.errors import (
    ContextExceeded,
    LocalchatError,
    ModelMissing,
    NetworkError,
    TemplateError,
    UsageError,
)

_MAX_MESSAGE_CHARS: Final = 500
_TOO_LONG_CODES: Final = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_TOO_LONG: Final = re.compile(
    r"context (?:length|size|window)|prompt is too long|input is too long|maximum (?:input|model) length",
    re.IGNORECASE,
)
_LIMITS: Final = (
    re.compile(
        r"(?:context|model) (?:length|size|window)(?: is| of|:)? \(?([\d,]+)", re.IGNORECASE
    ),
    re.compile(r"> ([\d,]+) maximum", re.IGNORECASE),
)
_PROMPTS: Final = (
    re.compile(r"\(([\d,]+) (?:tokens )?in the (?:messages|prompt|input)", re.IGNORECASE),
    re.compile(
        r"(?:has|contains|with|resulted in) ([\d,]+) (?:input |prompt )?tokens", re.IGNORECASE
    ),
    re.compile(r"(?:input|prompt) (?:is too long: |length |\()+([\d,]+)", re.IGNORECASE),
    re.compile(r"requested ([\d,]+) tokens in the (?:messages|prompt)", re.IGNORECASE),
    re.compile(r"([\d,]+) tokens from the input", re.IGNORECASE),
)
_TEMPLATE: Final = re.compile(
    r"roles must alternate|system (?:role|message) (?:is )?(?:not supported|must)|chat template",
    re.IGNORECASE,
)
_LONGEST: Final = (re.compile(r"at most ([\d,]+) completion tokens", re.IGNORECASE),)


class ServerError(NamedTuple):
    """An error message of a server."""

    text: str
    code: str
    """Error code or type, or an empty string."""
    fields: dict[str, Any]


def error_from_status(status: int, text: str, base: str) -> LocalchatError:
    """Return the error for a status other than 200.

    The server's message is cut to a readable length.
    """
    error = _parse_error(text)
    message = (
        f"{base} answered {status}: {error.text}" if error.text else f"{base} answered {status}"
    )
    if status in (400, 413, 422, 500) and _is_too_long(error):
        return _too_long(message, error)
    if status in (400, 422, 500) and _is_template_error(error):
        return TemplateError(message, reason="refused")
    if status in (400, 422) and (longest := _first(_LONGEST, error.text)):
        return _answer_too_long(message, longest)
    match status:
        case 401 | 403:
            hint = "does it need a key? set `key_env` or `key_file` of the remote"
        case 404 if error.code == "model_not_found" or "model" in error.text.lower():
            return ModelMissing(
                message,
                hint="set the `model` of the remote to one that the server lists",
                status=404,
            )
        case 404:
            hint = "is this the address of an OpenAI-compatible server?"
        case 400 | 405 | 413 | 415 | 422:
            return UsageError(message, status=status)
        case 402 | 429:
            hint = (
                "it limits how much may be asked: wait, or look at the limits of your account there"
            )
        case 502 | 503 | 504:
            hint = "the server behind this address is starting, overloaded or gone: try again soon"
        case _:
            hint = "the server failed; see its log"
    return NetworkError(message, hint=hint, status=status)


def error_from_stream(body: dict[str, Any], base: str, *, partial: bool) -> LocalchatError:
    """Return the error for an error object in a stream. Before the first token it is treated like a status."""
    error = _parse_error(json.dumps(body))
    if not partial:
        status = error.fields.get("code", error.fields.get("status"))
        if not isinstance(status, int) or not 400 <= status < 600:
            status = 500
        return error_from_status(status, json.dumps(body), base)
    return NetworkError(
        f"{base} ended its answer with an error: {error.text or error.code or 'no reason given'}",
        hint="the partial answer is kept; see the server's log",
    )


def is_error(chunk: dict[str, Any]) -> bool:
    """Return whether a chunk of a stream is an error."""
    return bool(chunk.get("error")) or chunk.get("object") == "error"


def _is_too_long(error: ServerError) -> bool:
    return error.code in _TOO_LONG_CODES or bool(_TOO_LONG.search(error.text))


def _is_template_error(error: ServerError) -> bool:
    """Return whether the server's chat template rejected the conversation. Another form may work."""
    return error.code == "chat_template_error" or bool(_TEMPLATE.search(error.text))


def _too_long(message: str, error: ServerError) -> LocalchatError:
    context = count(error.fields.get("n_ctx")) or _first(_LIMITS, error.text)
    prompt = count(error.fields.get("n_prompt_tokens")) or _first(_PROMPTS, error.text)
    if context and prompt and prompt < context:
        return _answer_too_long(message, context - prompt)
    details = {"context_tokens": context, "prompt_tokens": prompt}
    return ContextExceeded(
        message,
        hint="shorten the input, or use a server with a longer context",
        **{name: tokens for name, tokens in details.items() if tokens},
    )


def _answer_too_long(message: str, room_tokens: int) -> UsageError:
    """Return the error for a prompt that leaves too little room for the answer."""
    hint = "the prompt fits, but not the longest answer: lower --max-tokens"
    return UsageError(message, hint=hint, room_tokens=room_tokens)


def _first(patterns: tuple[re.Pattern[str], ...], text: str) -> int:
    for pattern in patterns:
        if body := pattern.search(text):
            return int(body[1].replace(",", ""))
    return 0


def _parse_error(text: str) -> ServerError:
    """Return the message and code of an error body in any format."""
    try:
        body = json.loads(text)
    except ValueError:
        return ServerError(" ".join(text.split())[:_MAX_MESSAGE_CHARS], "", {})
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return ServerError(str(error)[:_MAX_MESSAGE_CHARS], "", {})
    text = error.get("message") or error.get("detail") or ""
    codes = [error.get("code"), error.get("type")]
    code = next((code for code in codes if isinstance(code, str) and code), "")
    return ServerError(str(text)[:_MAX_MESSAGE_CHARS], code, error)
