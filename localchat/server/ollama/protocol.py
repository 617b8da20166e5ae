"""Request types of Ollama's API. Null means "not given"."""

from typing import Any, TypeAlias

import msgspec

from localchat.server.chat.messages import ToolCallParam
from localchat.server.chat.structure import TokenFields
from localchat.server.chat.tools import ChatTool


class OllamaMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCallParam] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaOptions(TokenFields, frozen=True):
    """Sampling and limits. Options of the load, such as `num_gpu`, are ignored."""

    seed: int | None = None
    num_predict: int | None = None
    """Length of the answer in tokens. 0 and below mean no limit."""
    stop: str | list[str] | None = None
    num_ctx: int | None = None
    """Requested context in tokens. The model is loaded with the longest that fits; a header reports a shorter
    one."""


KeepAlive: TypeAlias = float | str | None
"""Time that the model stays loaded after the answer: seconds, or `5m`. 0 unloads it, below 0 keeps it."""


class AnswerBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every request for an answer."""

    model: str
    stream: bool | None = None
    """True if absent."""
    format: str | dict[str, Any] | None = None
    """`json` or a JSON schema."""
    options: OllamaOptions | None = None
    think: bool | str | None = None
    """True, false or an effort."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: KeepAlive = None


class OllamaChatBody(AnswerBody, frozen=True, kw_only=True):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[ChatTool] | None = None


class OllamaGenerateBody(AnswerBody, frozen=True, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    """Use the prompt without the model's template."""
    template: str | None = None
    images: list[str] | None = None


class OllamaEmbedBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/embed, and /api/embeddings with `prompt`."""

    model: str
    input: str | list[str] | None = None
    prompt: str | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    """Cut a text that is too long for the model. True if absent, except at the older route."""
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None
