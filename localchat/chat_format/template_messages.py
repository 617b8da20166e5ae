"""Messages of a request as the dicts that chat templates read.

The dicts are OpenAI's, as in transformers: `content` a string, tool calls with their arguments as a
mapping, earlier reasoning as `reasoning_content` and, for templates that read that name, as
`thinking`. Templates differ in eight conventions of tool calls, and some fail silently, so the
conventions are data (ToolCallConvention).
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

_SHORT = 9
_WHOLE = "arguments"
"""Name of the one argument that broken JSON becomes, for templates that take mappings only."""


@dataclass(frozen=True, slots=True)
class ToolCallConvention:
    """How a template takes messages with tool calls."""

    arguments_as_text: bool = False
    """It wants JSON text; a mapping would be printed with Python's quotes."""
    mappings_only: bool = False
    """It fails on arguments that are text, such as those of a call that was cut off."""
    no_content_as_null: bool = False
    """It writes calls only if the content is null."""
    short_ids: bool = False
    """It takes only ids of nine letters and digits."""
    one_call: bool = False
    """It takes one call per message."""
    separate_text: bool = False
    """It writes the text of a message or its calls, and not both."""
    one_text: bool = False
    """It refuses a message with calls that has both reasoning and text."""
    calls_as_text: bool = False
    """It writes no calls, so they are added to the text."""
    results_as_users: bool = False
    """It writes no results, so they become messages of the user."""


def to_dicts(
    messages: Sequence[Message],
    convention: ToolCallConvention | None = None,
    syntax: ToolCallSyntax | None = None,
) -> list[dict[str, Any]]:
    """One dict per message, without empty fields except `content`.

    syntax: how to write calls that the template does not; None leaves them to the template.
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
    """Split messages of several calls into messages of one call, each followed by its result."""
    waiting = list(messages)
    while waiting:
        message = waiting.pop(0)
        if len(message.tool_calls) < 2:
            yield message
            continue
        results = []
        while waiting and waiting[0].role == "tool":
            results.append(waiting.pop(0))
        for number, call in enumerate(message.tool_calls):
            head = (
                message
                if not number
                else msgspec.structs.replace(message, content="", reasoning="")
            )
            yield msgspec.structs.replace(head, tool_calls=(call,))
            result = next((one for one in results if one.tool_call_id == call.id), None)
            if result is None and results:
                result = results[0]
            if result is not None:
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
    arguments = call.arguments if convention.arguments_as_text else _mapping(call.arguments)
    if convention.mappings_only and isinstance(arguments, str):
        arguments = {_WHOLE: arguments}
    fields: dict[str, Any] = (
        {"id": _id(call.id, convention)} if call.id or convention.short_ids else {}
    )
    return fields | {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def _id(text: str, convention: ToolCallConvention) -> str:
    """An id as the template takes it: equal ids stay equal, so that results match their calls."""
    if not convention.short_ids or (len(text) == _SHORT and text.isalnum()):
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:_SHORT]


def _mapping(text: str) -> dict[str, Any] | str:
    """Parse arguments as a mapping, or keep the text: a model may write anything."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def complete_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's shape with no field missing: templates fail without description or parameters."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return dict(tool)
    parameters = function.get("parameters") or {"type": "object"}
    if isinstance(parameters, Mapping) and parameters.get("type", "object") == "object":
        parameters = {"type": "object", "properties": {}, **parameters}
    completed = {"name": "", "description": "", **function, "parameters": parameters}
    completed["description"] = completed["description"] or ""
    return {
        **(tool if "function" in tool else {}),
        "type": "function",
        "function": completed,
    }
