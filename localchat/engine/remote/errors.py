"""What a server says when it refuses, or gives up in the middle, as one of our errors.

Servers word a prompt that is too long in many ways. Numbers are taken over where it is plain what they count,
and left out otherwise: a wrong one would mislead more than none.
"""

import json
import re
from typing import Any, Final, NamedTuple

from localchat.errors import (
    ContextExceeded,
    LocalchatError,
    ModelMissing,
    NetworkError,
    TemplateError,
    UsageError,
)

_MOST_TOLD: Final = 500
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
    """An error as a server words it. code: of whichever kind it has, empty for none."""

    sentence: str
    code: str
    fields: dict[str, Any]


def refusal_of(status: int, text: str, base: str) -> LocalchatError:
    """Our error for a status other than 200. The server's own sentence is kept, cut to what can be read."""
    said = _said(text)
    told = (
        f"{base} answered {status}: {said.sentence}"
        if said.sentence
        else f"{base} answered {status}"
    )
    if status in (400, 413, 422, 500) and _is_too_long(said):
        return _too_long(told, said)
    if status in (400, 422, 500) and _is_template(said):
        return TemplateError(told, reason="refused")
    if status in (400, 422) and (longest := _first(_LONGEST, said.sentence)):
        return _no_room(told, longest)
    match status:
        case 401 | 403:
            hint = "does it want a key? `key_env` or `key_file` of the remote names one"
        case 404 if said.code == "model_not_found" or "model" in said.sentence.lower():
            return ModelMissing(
                told, hint="the `model` of the remote must be one that the server lists", status=404
            )
        case 404:
            hint = "is this the address of an OpenAI-compatible server?"
        case 400 | 405 | 413 | 415 | 422:
            return UsageError(told, status=status)
        case _:
            hint = "the server has trouble; its own log says more"
    return NetworkError(told, hint=hint, status=status)


def broken_off(found: dict[str, Any], base: str, *, begun: bool) -> LocalchatError:
    """An error that came in a stream. Before the first token it is a refusal like any other."""
    said = _said(json.dumps(found))
    if not begun:
        status = said.fields.get("code", said.fields.get("status"))
        known = isinstance(status, int) and 400 <= status < 600
        return refusal_of(status if known else 500, json.dumps(found), base)  # type: ignore[arg-type]
    return NetworkError(
        f"{base} ended its answer with an error: {said.sentence or said.code or 'it does not say which'}",
        hint="what came is kept; the server's log says more",
    )


def is_error(chunk: dict[str, Any]) -> bool:
    """Whether a chunk of a stream is an error and no piece of an answer."""
    return bool(chunk.get("error")) or chunk.get("object") == "error"


def _is_too_long(said: ServerError) -> bool:
    return said.code in _TOO_LONG_CODES or bool(_TOO_LONG.search(said.sentence))


def _is_template(said: ServerError) -> bool:
    """Whether the chat template there refuses the conversation: another way of putting it may do."""
    return said.code == "chat_template_error" or bool(_TEMPLATE.search(said.sentence))


def _too_long(told: str, said: ServerError) -> LocalchatError:
    context = _number(said.fields.get("n_ctx")) or _first(_LIMITS, said.sentence)
    prompt = _number(said.fields.get("n_prompt_tokens")) or _first(_PROMPTS, said.sentence)
    if context and prompt and prompt < context:
        return _no_room(told, context - prompt)
    details = {"context_tokens": context, "prompt_tokens": prompt}
    return ContextExceeded(
        told,
        hint="a shorter input, or a server with a longer context",
        **{name: count for name, count in details.items() if count},
    )


def _no_room(told: str, room: int) -> UsageError:
    """Not the prompt is too long but the longest answer; its details say for how much there is room."""
    hint = "the prompt fits, the longest answer does not: --max-tokens"
    return UsageError(told, hint=hint, room_tokens=room)


def _first(patterns: tuple[re.Pattern[str], ...], sentence: str) -> int:
    for pattern in patterns:
        if found := pattern.search(sentence):
            return int(found[1].replace(",", ""))
    return 0


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _said(text: str) -> ServerError:
    """The sentence and the code of an error body, of whichever shape."""
    try:
        found = json.loads(text)
    except ValueError:
        return ServerError(" ".join(text.split())[:_MOST_TOLD], "", {})
    error = found.get("error", found) if isinstance(found, dict) else found
    if not isinstance(error, dict):
        return ServerError(str(error)[:_MOST_TOLD], "", {})
    sentence = error.get("message") or error.get("detail") or ""
    codes = [error.get("code"), error.get("type")]
    code = next((one for one in codes if isinstance(one, str) and one), "")
    return ServerError(str(sentence)[:_MOST_TOLD], code, error)
