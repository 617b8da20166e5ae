"""Wire types of OpenAI's chat, completions and embeddings endpoints.

Responses: an optional field is left out rather than null, because clients expect one kind of delta per chunk
and trip over empty ones; the key `error` appears in errors only. Requests: server/fields.py decides
about unknown fields; null means "not given". Values are checked where they are used (requests.py).
"""

from codecs import getincrementaldecoder
from typing import Any, Literal

import msgspec

from localchat.engine.events import TokenLogprob, Usage
from localchat.server.chat.logprobs import ChatTokenLogprob
from localchat.server.chat.messages import Content
from localchat.server.chat.options import GenerationFields
from localchat.server.chat.tools import ChatTool, FunctionDefinition


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class UsageInfo(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_info(usage: Usage) -> UsageInfo:
    return UsageInfo(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens),
        CompletionTokensDetails(usage.reasoning_tokens),
    )


# ---------------------------------------------------------------------------- tool calls


class FunctionCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a call in a stream. Only the first has id, type and name."""

    index: int
    function: FunctionCallDelta
    id: str | None = None
    type: Literal["function"] | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, frozen=True):
    id: str
    type: Literal["function"]
    function: FunctionCall


class CustomCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    input: str
    name: str | None = None


class CustomToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a call of a custom tool. Its text comes in one piece, once it is complete."""

    index: int
    custom: CustomCallDelta
    id: str | None = None
    type: Literal["custom"] | None = None


class MessageCustomToolCall(msgspec.Struct, frozen=True):
    id: str
    type: Literal["custom"]
    custom: "CustomCall"


# ---------------------------------------------------------------------------- logprobs


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a plain completion: lists of equal length, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def completion_logprobs(
    logprobs: tuple[TokenLogprob, ...], offset: int, first: str | None = None
) -> CompletionLogprobs:
    """Log probabilities of a completion's tokens.

    offset: characters of the text before these tokens; tokens that share a character have the same offset.
    first: a token before them without a log probability, the start of an echoed prompt.
    """
    made = CompletionLogprobs([], [], [], [])
    if first is not None:
        made.tokens.append(first)
        made.token_logprobs.append(None)
        made.top_logprobs.append(None)
        made.text_offset.append(offset)
        offset += len(first)
    decoder = getincrementaldecoder("utf-8")("replace")
    for one in logprobs:
        made.tokens.append(_distinct(one.text))
        made.token_logprobs.append(one.logprob)
        made.top_logprobs.append({_distinct(text): logprob for _, text, logprob in one.top} or None)
        made.text_offset.append(offset)
        offset += len(decoder.decode(one.text))
    return made


def _distinct(token: bytes) -> str:
    """The text of a token. Part of a character is written as OpenAI does, so that no two are equal."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        shown = (chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in token)
        return "bytes:" + "".join(shown)


# ---------------------------------------------------------------------------- chat


class DeltaMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta | CustomToolCallDelta] | None = None
    function_call: FunctionCallDelta | None = None


class ChatChunkChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    delta: DeltaMessage
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
    usage: UsageInfo | None = None
    timings: dict[str, Any] | None = None
    prompt_progress: dict[str, float] | None = None
    x_localchat: dict[str, Any] | None = None
    """Our own extension: `tries`, what several tries brought and cost."""


class AssistantMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str
    content: str | None
    refusal: None
    """Strict clients want the key."""
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall | MessageCustomToolCall] | None = None
    function_call: FunctionCall | None = None


class ChatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None
    stop_reason: str | None = None


# ---------------------------------------------------------------------------- plain completions


class CompletionChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | None = None


# ---------------------------------------------------------------------------- requests


class FunctionCallParam(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class CustomCall(msgspec.Struct, frozen=True):
    """A call of a tool that takes a text."""

    name: str
    input: str


class ToolCallParam(msgspec.Struct, frozen=True):
    """A tool call in a message of the assistant: of a function, or of a custom tool."""

    function: FunctionCallParam | None = None
    id: str | None = None
    custom: CustomCall | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: Content = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    function_call: FunctionCallParam | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True):
    """The choice of a tool. `name`: its place in the Responses API; `allowed_tools`: a choice of several."""

    function: NamedFunction | None = None
    type: str = "function"
    name: str | None = None
    allowed_tools: "AllowedTools | None" = None
    custom: NamedFunction | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    tools: list[NamedToolChoice]
    mode: str | None = None


class TriesExtension(msgspec.Struct, frozen=True):
    """Our own field of a chat: more tries at one answer."""

    vote: int | None = None
    """Try so often; the answer that most agree on."""
    vote_by: str | None = None
    """What a vote counts: number, text, field:NAME or regex:PATTERN."""
    critique: bool | None = None
    """The model judges its answer, and mends it."""
    judge: bool | None = None
    """With `best_of`: the model itself picks."""


class ChatBody(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    best_of: int | None = None
    """Try so often, and send the answer with the highest mean log probability."""
    x_localchat: TriesExtension | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    """llama.cpp's name for the longest answer; its editors send 0 to fill the cache before the user has
    asked."""
    tools: list[ChatTool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    functions: list[FunctionDefinition] | None = None
    """Deprecated form of `tools`, with one call at a time."""
    function_call: str | NamedFunction | None = None
    """Deprecated form of `tool_choice`."""
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    reasoning: Any = None
    """Turns thinking on or off in other servers' APIs, as do the next two; of any shape, as each has its own.
    `reasoning.max_tokens` and `thinking.budget_tokens` are most tokens of reasoning."""
    thinking: Any = None
    enable_thinking: Any = None
    thinking_budget: int | None = None
    """Most tokens of reasoning, as Qwen's servers call it; below, as llama.cpp and vLLM do."""
    thinking_budget_tokens: int | None = None
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    """Continue the last message if it is the assistant's. True if absent."""


class CompletionBody(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    n_predict: int | None = None
    """llama.cpp's name for the longest answer."""
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """POST /tokenize: a text, or a conversation as the model will see it."""

    content: str | None = None
    """A text in llama.cpp's form: markup in it is plain text, unless `parse_special` is set."""
    prompt: str | None = None
    """A text in vLLM's form: markup in it becomes control tokens, unless `parse_special` is false."""
    add_special: bool | None = None
    """Begin with the BOS token if the model's texts do. False if absent."""
    add_special_tokens: bool | None = None
    """vLLM's name of `add_special`. True if absent."""
    messages: list[ChatMessage] | None = None
    tools: list[ChatTool] | None = None
    model: str | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    """Return each id with its text, as llama.cpp's clients expect."""
    return_token_strs: bool | None = None
    """Return a list with the text of each token, as vLLM's clients expect."""


class DetokenizeBody(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class TemplateBody(msgspec.Struct, frozen=True):
    """POST /apply-template."""

    messages: list[ChatMessage]
    tools: list[ChatTool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    model: str | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
