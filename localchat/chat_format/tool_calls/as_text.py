"""Tools, earlier calls and their results as plain text, for templates that cannot render them.

Such a template leaves them out silently, and the model sees answers without their questions. Calls use the
syntax of the model's family (families.py).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from localchat.chat_format.tool_calls.families import HERMES
from localchat.chat_format.tool_calls.family import NUMBER, ToolCallSyntax
from localchat.engine.request import CalledTool, Message

_SEPARATOR = "\n\n"


_EXAMPLE = CalledTool("NAME", '{"ARGUMENT": "VALUE"}')


def with_tools_described(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    syntax: ToolCallSyntax,
    *,
    in_system: bool,
) -> tuple[Message, ...]:
    """Describe the tools in the system message, or in the user's first message."""
    functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    description = _SEPARATOR.join(
        (
            "You can call tools. Their results follow in the next message. The tools:",
            "\n".join(functions),
            f"To call a tool, write only this:\n{_calls_text((_EXAMPLE,), syntax)}",
            "Answer without a call if you need none.",
        )
    )
    role = "system" if in_system else "user"
    described = list(messages)
    for index, message in enumerate(described):
        if message.role == role:
            content = f"{message.content}{_SEPARATOR}{description}"
            if role == "user":
                content = f"{description}{_SEPARATOR}{message.content}"
            described[index] = msgspec.structs.replace(message, content=content)
            return tuple(described)
    return (Message(role, description), *described)


def calls_as_text(messages: Sequence[Message], syntax: ToolCallSyntax) -> list[Message]:
    """Append the calls of each message to its text."""
    result = []
    for message in messages:
        if message.tool_calls:
            calls = _calls_text(message.tool_calls, syntax)
            content = "\n".join(text for text in (message.content, calls) if text)
            message = msgspec.structs.replace(message, content=content, tool_calls=())
        result.append(message)
    return result


def results_as_user_messages(messages: Sequence[Message]) -> list[Message]:
    """Turn results into user messages, and join consecutive ones."""
    joined: list[Message] = []
    for message in messages:
        is_result = message.role == "tool"
        if is_result:
            name = f" of {message.name}" if message.name else ""
            message = Message("user", f"Result{name}:\n{message.content}")
        joins = is_result or (bool(joined) and joined[-1].content.startswith("Result"))
        if joins and joined and joined[-1].role == message.role == "user":
            message = Message("user", f"{joined.pop().content}{_SEPARATOR}{message.content}")
        joined.append(message)
    return joined


def separate_text(messages: Sequence[Message]) -> Iterator[Message]:
    """Move the text of a message with calls into a message before it."""
    for message in messages:
        if message.tool_calls and message.content:
            yield msgspec.structs.replace(message, tool_calls=())
            message = msgspec.structs.replace(message, content="", reasoning="")
        yield message


def _calls_text(calls: Sequence[CalledTool], syntax: ToolCallSyntax) -> str:
    if syntax.notation not in ("json", "python"):
        syntax = HERMES.syntax
    texts = [
        f"{syntax.head}{call.name}{syntax.middle}{_arguments(call, syntax)}{syntax.tail}".replace(
            NUMBER, str(number)
        )
        for number, call in enumerate(calls)
    ]
    return f"{syntax.begin}{syntax.between.join(texts)}{syntax.end}"


def _arguments(call: CalledTool, syntax: ToolCallSyntax) -> str:
    if syntax.notation == "json":
        return call.arguments
    try:
        values = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    if not isinstance(values, dict):
        return call.arguments
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
