"""What clients send. Fields that are not named here are ignored, as every such server does; null stands for
«not given» wherever a field may be left out. Values are checked where they are used."""

from typing import Any, TypeAlias

import msgspec


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
