"""What clients read: responses and chunks. A field that may be left out is left out rather than blank,
because readers take one kind of delta per chunk and trip over empty ones; the key `error` never stands in
anything that is none."""

from codecs import getincrementaldecoder
from typing import Any, Literal

import msgspec

from localchat.engine.events import Done, TokenLogprob, Usage


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class UsageReply(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


def usage_reply(usage: Usage) -> UsageReply:
    return UsageReply(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        CachedTokens(usage.cached_tokens),
    )


def timings_reply(done: Done) -> dict[str, Any]:
    """The figures of one request by their names in the table of figures."""
    figures: dict[str, Any] = msgspec.structs.asdict(done.timings)
    figures |= {
        "kv_used_tokens": done.kv_used_tokens,
        "kv_total_tokens": done.kv_total_tokens,
        "drafted": done.speculation.drafted,
        "accepted": done.speculation.accepted,
        "speedup": done.speculation.speedup,
        "speculation_off": done.speculation.off,
        "fingerprint": done.fingerprint,
    }
    return figures


# ---------------------------------------------------------------------------- tool calls


class CallFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    arguments: str
    name: str | None = None


class CallPiece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a call in a stream: id, type and name stand in its first piece only."""

    index: int
    function: CallFunction
    id: str | None = None
    type: Literal["function"] | None = None


class WholeFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class WholeCall(msgspec.Struct, frozen=True):
    id: str
    type: Literal["function"]
    function: WholeFunction


# ---------------------------------------------------------------------------- logprobs


class TopToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatToken]
    refusal: None = None


def chat_tokens(logprobs: tuple[TokenLogprob, ...]) -> list[ChatToken]:
    return [
        ChatToken(
            _shown(one.text),
            one.logprob,
            list(one.text),
            [TopToken(_shown(text), logprob, list(text)) for _, text, logprob in one.top],
        )
        for one in logprobs
    ]


class TextLogprobs(msgspec.Struct):
    """Of a plain completion: lists of equal length, an entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def text_logprobs(
    logprobs: tuple[TokenLogprob, ...], offset: int, first: str | None = None
) -> TextLogprobs:
    """`offset`: characters of the text before these tokens; tokens that share a character stand where it does.
    `first`: a token before them that nothing predicted, the beginning of an echoed prompt."""
    made = TextLogprobs([], [], [], [])
    if first is not None:
        made.tokens.append(first)
        made.token_logprobs.append(None)
        made.top_logprobs.append(None)
        made.text_offset.append(offset)
        offset += len(first)
    decoder = getincrementaldecoder("utf-8")("replace")
    for one in logprobs:
        made.tokens.append(_shown(one.text))
        made.token_logprobs.append(one.logprob)
        made.top_logprobs.append({_shown(text): logprob for _, text, logprob in one.top} or None)
        made.text_offset.append(offset)
        offset += len(decoder.decode(one.text))
    return made


def _shown(token: bytes) -> str:
    return token.decode("utf-8", "replace")


# ---------------------------------------------------------------------------- chat


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallPiece] | None = None
    function_call: CallFunction | None = None


class ChunkChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | None = None


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: UsageReply | None = None
    timings: dict[str, Any] | None = None


class WholeMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[WholeCall] | None = None
    function_call: WholeFunction | None = None


class WholeChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    message: WholeMessage
    finish_reason: str
    logprobs: ChatLogprobs | None
    stop_reason: str | None = None


# ---------------------------------------------------------------------------- plain completions


class TextChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: str | None = None
