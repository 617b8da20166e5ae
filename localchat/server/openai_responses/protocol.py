"""What clients of the Responses API send. Unknown fields are ignored, null stands for «not given»."""

from typing import Any, TypeAlias

import msgspec

from localchat.server.openai.protocol import ContentPart

ContentParts: TypeAlias = str | list[ContentPart | str] | None


class InputItem(msgspec.Struct, frozen=True):
    """A piece of the conversation. Which fields it has depends on its type; a message may leave that out."""

    type: str | None = None
    role: str | None = None
    content: ContentParts = None
    summary: list[ContentPart] | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    call_id: str | None = None
    output: ContentParts = None


class ResponsesTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function with its fields beside its type; a `custom` tool, which takes a text of a `format`; or a
    namespace of functions."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: "list[ResponsesTool] | None" = None


class ResponsesToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that is asked for by its name."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: "list[ResponsesToolChoice] | None" = None


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    format: TextFormat | None = None


class ReasoningConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses. `include`, `store` and `truncation` change nothing: everything that there is comes
    with the answer, nothing is kept, nothing is cut. tools and tool_choice are said again as they came."""

    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    seed: int | None = None
