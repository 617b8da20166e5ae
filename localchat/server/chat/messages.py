"""Converts the messages of a client to those of the engine.

No text is lost. Templates often refuse two messages of one role in a row, so neighbors are joined where
possible. template_variants.py adapts the result to templates that refuse more.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from localchat.engine.request import Message
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request, missing_field

SEPARATOR: Final = "\n\n"
_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content. Only text is supported."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None


Content: TypeAlias = str | list[ContentPart | str] | None


def normalize_messages(messages: Sequence[Message], limits: ServerLimits) -> tuple[Message, ...]:
    """Join neighbors of one role and name the tools of results. Raises ApiError."""
    if not messages:
        raise missing_field(
            "messages", "The field 'messages' is empty: there is nothing to answer."
        )
    if len(messages) > limits.messages:
        raise bad_request(
            f"There are {len(messages)} messages; the limit is {limits.messages}.", param="messages"
        )
    return join_messages(_with_tool_names(messages))


def join_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join neighbors of one role that are plain text."""
    result: list[Message] = []
    for message in messages:
        previous = result[-1] if result else None
        if (
            previous is not None
            and previous.role == message.role
            and _is_plain_text(previous)
            and _is_plain_text(message)
        ):
            texts = [text for text in (previous.content, message.content) if text]
            result[-1] = msgspec.structs.replace(previous, content=SEPARATOR.join(texts))
        else:
            result.append(message)
    return tuple(result)


def _is_plain_text(message: Message) -> bool:
    bare = not (message.tool_calls or message.tool_call_id or message.reasoning or message.name)
    return bare and message.role != "tool"


def _with_tool_names(messages: Sequence[Message]) -> list[Message]:
    """Add the tool's name to tool results: templates print it, but clients send only the call's id."""
    # Ids may repeat in a long conversation. A result belongs to the last call before it.
    names: dict[str, str] = {}
    result: list[Message] = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "tool" and not message.name and message.tool_call_id in names:
            message = msgspec.structs.replace(message, name=names[message.tool_call_id])
        result.append(message)
    return result


def engine_role(role: str, param: str) -> str:
    """Return the engine's name of a role. Raises ApiError."""
    name = _ROLES.get(role)
    if name is None:
        raise bad_request(
            f"The role {role[:50]!r} is unknown; the choices are {', '.join(_ROLES)}.", param=param
        )
    return name


def encode_arguments(arguments: str | dict[str, Any] | None) -> str:
    """Return the arguments of a call as JSON. Some clients send the parsed object."""
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    return arguments or "{}"


def decode_arguments(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; empty if the token limit cut them off."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def text_of(content: Content, param: str, *, role: str = "user") -> str:
    """Return the text of a message's content. Raises ApiError for images, audio and files.

    Parts of a user's message become lines. Parts of an assistant's message are pieces of one text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    separator = "" if role == "assistant" else "\n"
    return separator.join(
        _part_text(part, f"{param}[{index}]") for index, part in enumerate(content)
    )


def _part_text(part: ContentPart | str, param: str) -> str:
    if isinstance(part, str):
        return part
    if part.type not in _TEXT_PARTS:
        raise bad_request(
            f"This model reads text only; a part of type {part.type[:50]!r} cannot be read.",
            param=param,
        )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise missing_field(f"{param}.text")
    return text
