"""Messages of a request as the dicts that chat templates read.

The shape is OpenAI's, as transformers hands it on: `content` a string, tool calls with their
arguments as a mapping, the reasoning of earlier turns as `reasoning_content` and, for templates
that read that name, as `thinking`. Two habits differ from template to template and fail silently,
so they are data (`Dialect`): some want arguments as JSON text (a mapping would be printed with
Python's quotes), some write tool calls only where the content is null.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localchat.engine.request import CalledTool, Message


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a template wants of a message with tool calls."""

    arguments_as_text: bool = False
    no_content_as_null: bool = False


def to_dicts(messages: Sequence[Message], dialect: Dialect | None = None) -> list[dict[str, Any]]:
    """One dict a message, empty fields left out; `content` is always there."""
    wanted = dialect or Dialect()
    return [_message(message, wanted) for message in messages]


def _message(message: Message, dialect: Dialect) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if message.reasoning:
        made["thinking"] = message.reasoning
    made["role"] = message.role
    made["content"] = message.content
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [_call(call, dialect) for call in message.tool_calls]
        if dialect.no_content_as_null and not message.content:
            made["content"] = None
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.name:
        made["name"] = message.name
    return made


def _call(call: CalledTool, dialect: Dialect) -> dict[str, Any]:
    arguments = call.arguments if dialect.arguments_as_text else _mapping(call.arguments)
    made: dict[str, Any] = {"id": call.id} if call.id else {}
    return made | {"type": "function", "function": {"name": call.name, "arguments": arguments}}


def _mapping(text: str) -> dict[str, Any] | str:
    """The arguments as a mapping; as text where they are none, because a model may write
    anything."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
