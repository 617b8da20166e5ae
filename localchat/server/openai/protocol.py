"""Wire types of OpenAI's chats and plain completions.

Responses omit an optional field instead of sending null, because clients expect one kind of delta per chunk.
The key `error` appears only in errors. In requests, null means "not given"; server/fields.py handles unknown
fields.
"""

from codecs import getincrementaldecoder
from typing import Any, Literal

import msgspec

from localchat.engine.events import TokenLogprob, Usage
from localchat.server.chat.logprobs import ChatTokenLogprob
from localchat.server.chat.messages import PartContent, ToolCallParam
from localchat.server.chat.options import GenerationFields
from localchat.server.chat.tools import ChatTool


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


class FunctionCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Piece of a call in a stream. Only the first piece has id, type and name."""

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
    logprobs: tuple[TokenLogprob, ...], offset: int, first: bytes | None = None
) -> CompletionLogprobs:
    """Convert the log probabilities of a completion's tokens.

    offset: characters of the text before these tokens. Tokens that share a character have the same offset.
    first: first token of an echoed prompt, which has no log probability.
    """
    result = CompletionLogprobs([], [], [], [])
    decoder = getincrementaldecoder("utf-8")("replace")
    if first is not None:
        result.tokens.append(_unique_text(first))
        result.token_logprobs.append(None)
        result.top_logprobs.append(None)
        result.text_offset.append(offset)
        offset += len(decoder.decode(first))
    for token in logprobs:
        top = {_unique_text(text): logprob for _, text, logprob in token.top}
        result.tokens.append(_unique_text(token.text))
        result.token_logprobs.append(token.logprob)
        result.top_logprobs.append(top or None)
        result.text_offset.append(offset)
        offset += len(decoder.decode(token.text))
    return result


def _unique_text(token: bytes) -> str:
    """Return the text of a token. Parts of a character are escaped as by OpenAI, so that no two are equal."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        escaped = (chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}" for byte in token)
        return "bytes:" + "".join(escaped)


class DeltaMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


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


class AssistantMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str
    content: str | None
    refusal: None
    """Always null. Strict clients require the key."""
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class ChatChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None
    stop_reason: str | None = None


class CompletionChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: PartContent = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCallParam] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True):
    """Choice of a tool, or of several in `allowed_tools`. `name` is the Responses API's field for the name."""

    function: NamedFunction | None = None
    type: str = "function"
    name: str | None = None
    allowed_tools: "AllowedTools | None" = None


class AllowedTools(msgspec.Struct, frozen=True):
    tools: list[NamedToolChoice]
    mode: str | None = None


class ChatBody(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    n_predict: int | None = None
    """llama.cpp's name of `max_tokens`. 0 only fills the cache."""
    tools: list[ChatTool] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    bind_arguments: bool | None = None
    """Bind the arguments of calls to their schemas. From another localchat."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    reasoning: Any = None
    """Turns thinking on or off in other servers' APIs, like the next two fields. Each server has its own shape.
    `reasoning.max_tokens` and `thinking.budget_tokens` limit the reasoning."""
    thinking: Any = None
    enable_thinking: Any = None
    thinking_budget: int | None = None
    """Limit of the reasoning in tokens, for Qwen's clients. The next two are llama.cpp's and vLLM's."""
    thinking_budget_tokens: int | None = None
    thinking_token_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    """Continue the last message if it is the assistant's. True if absent."""
    add_generation_prompt: bool | None = None
    """vLLM and llama.cpp require false for an answer that continues the last message. Here that is optional."""


class CompletionBody(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    n_predict: int | None = None
    """llama.cpp's name of `max_tokens`."""
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class TokenizeBody(msgspec.Struct, frozen=True):
    """POST /tokenize: a text, or a conversation as the model will see it."""

    content: str | None = None
    """Text in llama.cpp's form. Markup in it stays plain text, unless `parse_special` is set."""
    prompt: str | None = None
    """Text in vLLM's form. Markup in it becomes control tokens, unless `parse_special` is false."""
    add_special: bool | None = None
    """Start with the BOS token if the model's texts do. False if absent."""
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
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


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
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
