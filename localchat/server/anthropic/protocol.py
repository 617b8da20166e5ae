"""Request types of the Messages API. Null means "not given"."""

from typing import Any, TypeAlias

import msgspec

from localchat.server.chat.structure import AnswerFields, TypedFormat


class ContentSource(msgspec.Struct, frozen=True):
    """Content of a picture or a document: `data` for base64 or a text, `content` for blocks, or `url`."""

    type: str = ""
    data: str | None = None
    media_type: str | None = None
    """Ignored: the content shows its format."""
    url: str | None = None
    file_id: str | None = None
    content: "Content" = None


class InputBlock(msgspec.Struct, frozen=True):
    """Block of content. The type determines its fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: "Content" = None
    is_error: bool | None = None
    source: ContentSource | str | None = None
    title: str | None = None
    context: str | None = None
    """Context of a document, which the model reads too."""
    tool_name: str | None = None


Content: TypeAlias = str | list[InputBlock] | None


class InputMessage(msgspec.Struct, frozen=True):
    """A message of the conversation."""

    role: str
    content: Content = None


class MessagesTool(msgspec.Struct, frozen=True):
    """A tool that the client runs."""

    name: str
    type: str | None = None
    """Type of the tool: None or `custom`. Tools of other types run on Anthropic's servers."""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """Hide the tool from the model until a tool result refers to it."""


class ToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, frozen=True):
    type: str
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: TypedFormat | None = None


class CountTokensBody(AnswerFields, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens: the fields that make up the prompt.

    `output_format` is the deprecated name of `output_config.format`.
    """

    messages: list[InputMessage]
    model: str | None = None
    system: Content = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: TypedFormat | None = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    """Not in Anthropic's API. All other protocols have it."""
