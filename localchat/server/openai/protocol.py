"""What clients read: responses and chunks. A field that may be left out is left out rather than blank,
because readers take one kind of delta per chunk and trip over empty ones; the key `error` never stands in
anything that is none."""

from codecs import getincrementaldecoder
from typing import Any, Literal, TypeAlias

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


# What clients send. Fields that are not named here are ignored, as every such server does; null stands for
# «not given» wherever a field may be left out. Values are checked where they are used.


class Part(msgspec.Struct, frozen=True):
    """A piece of a message's content. Only text can be read."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


Content: TypeAlias = str | list[Part | str] | None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class Call(msgspec.Struct, frozen=True):
    """A tool call in a message of the assistant."""

    function: CalledFunction
    id: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: Content = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    function: Function | None = None
    type: str = "function"


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """The choice of a tool. `name`: where the Responses API has it; `allowed_tools`: some of them."""

    function: NamedFunction | None = None
    type: str = "function"
    name: str | None = None
    allowed_tools: "AllowedTools | None" = None


class AllowedTools(msgspec.Struct, frozen=True):
    tools: list[NamedTool]
    mode: str | None = None


class Schema(msgspec.Struct, frozen=True):
    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`schema` beside `json_object` is llama.cpp's way of writing."""

    type: str
    json_schema: Schema | None = None
    schema: dict[str, Any] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and plain completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    regex: str | None = None
    response_format: ResponseFormat | None = None
    cache_salt: str | None = None
    speculation: bool | None = None
    timings: bool | None = None


class ChatBody(Shared, frozen=True, kw_only=True):
    """POST /v1/chat/completions. `n_predict`: llama.cpp's name for the longest answer; its editors send 0 to
    have the prompt computed before the question is written. `functions`, `function_call`: what tools were
    called while there was one call at a time. `thinking`, `enable_thinking`, `reasoning`: how clients of other
    servers turn thinking on and off; of any shape, as each server has its own."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    functions: list[Function] | None = None
    function_call: str | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    reasoning: Any = None
    thinking: Any = None
    enable_thinking: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Shared, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class EmbeddingsBody(msgspec.Struct, frozen=True):
    """POST /v1/embeddings."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """POST /tokenize: a text, or a conversation as the model will see it. `with_pieces`: each id with its text,
    as llama.cpp's clients ask for it."""

    content: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    model: str | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class TemplateBody(msgspec.Struct, frozen=True):
    """POST /apply-template."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    model: str | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
