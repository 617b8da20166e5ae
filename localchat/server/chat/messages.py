"""Converts a client's messages to the engine's and adapts them to rigid templates.

No text is lost. Many templates refuse two system messages, or two messages of one role in a row. Neighbours
that can be joined are joined; a late system message becomes the user's, or moves, only if the template
refuses or omits it.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from localchat.engine.request import CalledTool, Message
from localchat.server.chat.custom_tools import arguments_of
from localchat.server.config import ServerLimits
from localchat.server.errors import ApiError, bad_request
from localchat.server.openai.protocol import ChatMessage, Content, ContentPart, ToolCallParam

_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
SEPARATOR: Final = "\n\n"


def engine_messages(given: Sequence[ChatMessage], limits: ServerLimits) -> tuple[Message, ...]:
    """Convert messages, joining neighbours of one role. Raises ApiError."""
    if not given:
        raise bad_request(
            "The field 'messages' is empty: there is nothing to answer.",
            param="messages",
            code="missing_required_parameter",
        )
    if len(given) > limits.messages:
        raise bad_request(
            f"There are {len(given)} messages; the limit is {limits.messages}.", param="messages"
        )
    return joined(_with_tool_names([_message(at, message) for at, message in enumerate(given)]))


def joined(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join neighbours of one role that are plain text."""
    made: list[Message] = []
    for message in messages:
        if (
            made
            and _is_plain_text(made[-1])
            and _is_plain_text(message)
            and made[-1].role == message.role
        ):
            parts = [text for text in (made[-1].content, message.content) if text]
            made[-1] = msgspec.structs.replace(made[-1], content=SEPARATOR.join(parts))
        else:
            made.append(message)
    return tuple(made)


def _with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Add the tool's name to tool results.

    Templates print it, but clients send only the id of the call.
    """
    names: dict[str, str] = {}
    made: list[Message] = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool" and not message.name and message.tool_call_id in names:
            message = msgspec.structs.replace(message, name=names[message.tool_call_id])
        made.append(message)
    return made


def _is_plain_text(message: Message) -> bool:
    bare = not (message.tool_calls or message.tool_call_id or message.reasoning or message.name)
    return bare and message.role != "tool"


def _message(at: int, message: ChatMessage) -> Message:
    calls = message.tool_calls or (
        [ToolCallParam(message.function_call)] if message.function_call is not None else []
    )
    role = engine_role(message.role, f"messages[{at}].role")
    content = text_of(message.content, f"messages[{at}].content", role=role)
    return Message(
        role=role,
        content=content or message.refusal or "",
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=tuple(_call(call) for call in calls),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def engine_role(role: str, param: str) -> str:
    """The engine's name of a role. Raises ApiError."""
    known = _ROLES.get(role)
    if known is None:
        raise bad_request(
            f"The role {role[:50]!r} is unknown; the choices are {', '.join(_ROLES)}.", param=param
        )
    return known


def _call(call: ToolCallParam) -> CalledTool:
    if call.custom is not None:
        return CalledTool(call.custom.name, arguments_of(call.custom.input), call.id or "")
    if call.function is None:
        raise bad_request(
            "A tool call needs 'function' or 'custom'.",
            param="messages",
            code="missing_required_parameter",
        )
    arguments = call.function.arguments
    if isinstance(arguments, dict):  # some clients send the parsed object
        arguments = msgspec.json.encode(arguments).decode()
    return CalledTool(call.function.name, arguments or "{}", call.id or "")


def text_of(content: Content, param: str, *, role: str = "user") -> str:
    """The text of a message's content. Raises ApiError for images, audio and files.

    A user's parts are lines of their own; those of an assistant are pieces of one answer.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return ("" if role == "assistant" else "\n").join(
        _text(part, f"{param}[{at}]") for at, part in enumerate(content)
    )


def _text(part: ContentPart | str, param: str) -> str:
    if isinstance(part, str):
        return part
    if part.type not in _TEXT_PARTS:
        raise bad_request(
            f"This model reads text only; a part of type {part.type[:50]!r} cannot be read.",
            param=param,
        )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise ApiError(
            400,
            "missing_required_parameter",
            f"The field '{param}.text' is required.",
            param=f"{param}.text",
        )
    return text
