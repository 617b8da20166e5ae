"""Request types of the Responses API. Null means "not given"."""

from typing import Any

import msgspec

from localchat.server.chat.messages import ContentPart, PartContent
from localchat.server.chat.structure import AnswerFields, TypedFormat


class InputItem(msgspec.Struct, frozen=True):
    """Item of the conversation. The type determines its fields; a message may omit the type.

    Size: the protocol has many types of items.
    """

    type: str | None = None
    role: str | None = None
    content: PartContent = None
    summary: list[ContentPart] | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: PartContent = None
    id: str | None = None
    server_label: str | None = None
    """Server of an MCP item. The fields below belong to these items too."""
    tools: Any = None
    error: Any = None


class McpToolFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tools of an MCP server by name."""

    tool_names: list[str]


class ResponsesTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function, a namespace of functions, or an MCP server.

    Size: the protocol has one object for all types.
    """

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = None
    """Only `custom` tools have it, which are left out."""
    tools: "list[ResponsesTool] | None" = None
    server_label: str | None = None
    allowed_tools: list[str] | McpToolFilter | None = None
    require_approval: Any = None
    server_description: str | None = None
    server_url: str | None = None
    connector_id: str | None = None
    tunnel_id: str | None = None
    authorization: str | None = None
    headers: dict[str, Any] | None = None


class ResponsesToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool choice by name."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: "list[ResponsesToolChoice] | None" = None


class TextConfig(msgspec.Struct, frozen=True):
    format: TypedFormat | None = None


class ReasoningConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None
    max_tokens: int | None = None
    """Limit of the reasoning in tokens, from OpenRouter."""


class ResponsesBody(AnswerFields, frozen=True, kw_only=True):
    """POST /v1/responses.

    `include` only selects log probabilities. `store` and `truncation` have no effect: nothing is stored or
    truncated.
    """

    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    metadata: dict[str, Any] | None = None
    seed: int | None = None
