"""Calls and results of earlier turns as plain text, for templates that have no place for them.

Without it such a template leaves them out without a word, and the model reads results of questions that nobody
asked. Calls are written as the model's family writes them (styles.py).
"""

import json
from collections.abc import Iterator, Sequence

import msgspec

from localchat.chat_format.tool_calls.families import HERMES
from localchat.chat_format.tool_calls.family import NUMBER, ToolCallSyntax
from localchat.engine.request import CalledTool, Message

_BETWEEN = "\n\n"


def written_calls(messages: Sequence[Message], form: ToolCallSyntax) -> list[Message]:
    """Messages with their calls at the end of what they say."""
    return [
        msgspec.structs.replace(
            message,
            content="\n".join(
                text for text in (message.content, _written(message.tool_calls, form)) if text
            ),
            tool_calls=(),
        )
        if message.tool_calls
        else message
        for message in messages
    ]


def results_by_users(messages: Sequence[Message]) -> list[Message]:
    """Results as what the user says next, one message for all that stand together."""
    made: list[Message] = []
    for message in messages:
        result = message.role == "tool"
        if result:
            name = f" of {message.name}" if message.name else ""
            message = Message("user", f"Result{name}:\n{message.content}")
        joins = result or (bool(made) and made[-1].content.startswith("Result"))
        if joins and made and made[-1].role == message.role == "user":
            message = Message("user", f"{made.pop().content}{_BETWEEN}{message.content}")
        made.append(message)
    return made


def text_apart(messages: Sequence[Message]) -> Iterator[Message]:
    """What was said beside a call as a message before it."""
    for message in messages:
        if message.tool_calls and message.content:
            yield msgspec.structs.replace(message, tool_calls=())
            message = msgspec.structs.replace(message, content="", reasoning="")
        yield message


def _written(calls: Sequence[CalledTool], form: ToolCallSyntax) -> str:
    if form.written not in ("json", "python"):
        form = HERMES.form
    said = [
        f"{form.head}{call.name}{form.middle}{_arguments(call, form)}{form.tail}".replace(
            NUMBER, str(place)
        )
        for place, call in enumerate(calls)
    ]
    return f"{form.begin}{form.between.join(said)}{form.end}"


def _arguments(call: CalledTool, form: ToolCallSyntax) -> str:
    if form.written == "json":
        return call.arguments
    try:
        values = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments
    if not isinstance(values, dict):
        return call.arguments
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
