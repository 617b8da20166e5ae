"""Converts messages to the dicts that chat templates read.

The dicts have OpenAI's fields, as in transformers. `content` is a string, arguments of tool calls are a
mapping, and earlier reasoning is `reasoning_content` and, for other templates, `thinking`. Templates follow
different conventions for tool calls, and some fail silently, so the conventions are data
(ToolCallConvention).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from localchat.chat_format.tool_calls.as_text import (
    calls_as_text,
    results_as_user_messages,
    separate_text,
)
from localchat.chat_format.tool_calls.family import ToolCallSyntax
from localchat.engine.request import CalledTool, Message

_SHORT_ID_LENGTH = 9
_INVALID_ARGUMENTS = "arguments"
"""Name of the argument that holds invalid JSON, for templates that accept only mappings."""


@dataclass(frozen=True, slots=True)
class ToolCallConvention:
    """Requirements of a template for messages with tool calls."""

    arguments_as_text: bool = False
    """Arguments are JSON text. A mapping would be printed with Python's quotes."""
    mappings_only: bool = False
    """Arguments must not be text, such as those of a truncated call."""
    no_content_as_null: bool = False
    """The template writes calls only if the content is null."""
    short_ids: bool = False
    """Ids consist of nine letters and digits."""
    one_call: bool = False
    """A message has at most one call."""
    separate_text: bool = False
    """The template writes either the text of a message or its calls."""
    one_text: bool = False
    """A message with calls has reasoning or text, not both."""
    calls_as_text: bool = False
    """The template omits calls, so they become text."""
    results_as_users: bool = False
    """The template omits results, so they become user messages."""


def to_dicts(
    messages: Sequence[Message],
    convention: ToolCallConvention | None = None,
    syntax: ToolCallSyntax | None = None,
) -> list[dict[str, Any]]:
    """Return a dict per message. Empty fields other than `content` are left out.

    syntax: used for calls that the template omits. None leaves all calls to the template.
    """
    convention = convention or ToolCallConvention()
    if syntax is not None and convention.calls_as_text:
        messages = calls_as_text(messages, syntax)
    if syntax is not None and convention.results_as_users:
        messages = results_as_user_messages(messages)
    if convention.separate_text:
        messages = list(separate_text(messages))
    if convention.one_call:
        messages = list(_one_call_each(messages))
    return [_message(message, convention) for message in messages]


def _one_call_each(messages: Sequence[Message]) -> Iterator[Message]:
    """Split messages with several calls into messages with one call, each followed by its result."""
    remaining = list(messages)
    while remaining:
        message = remaining.pop(0)
        if len(message.tool_calls) < 2:
            yield message
            continue
        results = []
        while remaining and remaining[0].role == "tool":
            results.append(remaining.pop(0))
        for call in message.tool_calls:
            yield msgspec.structs.replace(message, tool_calls=(call,))
            # The text of the message precedes its first call only.
            message = msgspec.structs.replace(message, content="", reasoning="")
            if results:
                matching = (result for result in results if result.tool_call_id == call.id)
                result = next(matching, results[0])
                results.remove(result)
                yield result
        yield from results


def _message(message: Message, convention: ToolCallConvention) -> dict[str, Any]:
    if convention.one_text and message.tool_calls and message.reasoning and message.content:
        thoughts = f"{message.reasoning}\n\n{message.content}"
        message = msgspec.structs.replace(message, reasoning=thoughts, content="")
    fields: dict[str, Any] = {}
    if message.reasoning:
        fields["thinking"] = message.reasoning
    fields["role"] = message.role
    fields["content"] = message.content
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [_call(call, convention) for call in message.tool_calls]
        if convention.no_content_as_null and not message.content:
            fields["content"] = None
    if message.tool_call_id:
        fields["tool_call_id"] = _id(message.tool_call_id, convention)
    if message.name:
        fields["name"] = message.name
    return fields


def _call(call: CalledTool, convention: ToolCallConvention) -> dict[str, Any]:
    arguments: dict[str, Any] | str = call.arguments
    if not convention.arguments_as_text:
        arguments = _mapping(call.arguments)
    if convention.mappings_only and isinstance(arguments, str):
        arguments = {_INVALID_ARGUMENTS: arguments}
    fields: dict[str, Any] = {}
    if call.id or convention.short_ids:
        fields["id"] = _id(call.id, convention)
    return fields | {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def _id(text: str, convention: ToolCallConvention) -> str:
    """Return an id that the template accepts. Equal ids stay equal, so that results match their calls."""
    if not convention.short_ids or (len(text) == _SHORT_ID_LENGTH and text.isalnum()):
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_SHORT_ID_LENGTH]


def _mapping(text: str) -> dict[str, Any] | str:
    """Parse arguments as a mapping. Return other text unchanged, because a model may write anything."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def complete_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Add the missing fields of a tool in OpenAI's format. Templates fail without description or parameters."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return dict(tool)
    parameters = function.get("parameters") or {"type": "object"}
    if isinstance(parameters, Mapping) and parameters.get("type", "object") == "object":
        parameters = {"type": "object", "properties": {}, **parameters}
    completed = {"name": "", "description": "", **function, "parameters": parameters}
    completed["description"] = completed["description"] or ""
    wrapper = tool if "function" in tool else {}
    return {**wrapper, "type": "function", "function": completed}
