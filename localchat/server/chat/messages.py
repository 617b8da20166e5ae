"""Converts the messages of a client to those of the engine.

No text is lost. Templates often refuse two messages of one role in a row, so neighbors are joined where
possible. template_variants.py adapts the result to templates that refuse more.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec

from localchat.engine.attachments import Content, append_content, check_attachments, join_parts
from localchat.engine.request import Attachment, CalledTool, Message
from localchat.errors import UsageError
from localchat.server.chat.media import MediaReader
from localchat.server.config import ServerLimits
from localchat.server.errors import ApiError, bad_request, missing_field, to_api_error

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


class MediaUrl(msgspec.Struct, frozen=True):
    url: str
    detail: str | None = None


class InputAudio(msgspec.Struct, frozen=True):
    data: str | None = None
    format: str | None = None
    """Ignored: the content shows its format."""


class InputFile(msgspec.Struct, frozen=True):
    file_data: str | None = None
    filename: str | None = None
    file_url: str | None = None
    file_id: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content. The type determines its fields."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | str | None = None
    audio_url: MediaUrl | str | None = None
    input_audio: InputAudio | None = None
    file: InputFile | None = None
    file_data: str | None = None
    filename: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    detail: str | None = None
    """Resolution of a picture. Ignored: the model's projector decides."""


class FunctionCallParam(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallParam(msgspec.Struct, frozen=True):
    """Call of a function, in a message of the assistant."""

    function: FunctionCallParam
    id: str | None = None


PartContent: TypeAlias = str | list[ContentPart | str] | None


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
    check_text_size(messages, limits)
    try:
        check_attachments(messages)
    except UsageError as problem:
        raise to_api_error(problem) from problem
    return join_messages(_with_tool_names(messages))


def join_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join neighbors of one role that have only content."""
    result: list[Message] = []
    for message in messages:
        previous = result[-1] if result else None
        if (
            previous is not None
            and previous.role == message.role
            and _has_only_content(previous)
            and _has_only_content(message)
        ):
            result[-1] = append_content(previous, message, SEPARATOR)
        else:
            result.append(message)
    return tuple(result)


def _has_only_content(message: Message) -> bool:
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


def called_tools(calls: Sequence[ToolCallParam] | None) -> tuple[CalledTool, ...]:
    """Return the calls in a message of the assistant."""
    return tuple(
        CalledTool(call.function.name, encode_arguments(call.function.arguments), call.id or "")
        for call in calls or ()
    )


def encode_arguments(arguments: str | dict[str, Any] | None) -> str:
    """Return the arguments of a call as JSON. Some clients send the parsed object."""
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    return arguments or "{}"


def decode_arguments(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    Other text becomes a value of its own, so that the client's check of the arguments fails and shows it.
    """
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {"arguments": arguments}


def content_of(
    content: PartContent, param: str, media: MediaReader, *, role: str = "user"
) -> Content:
    """Return the text and the media of a message's content. Raises ApiError.

    Parts of a user's message become lines. Parts of an assistant's message are pieces of one text.
    """
    if content is None or isinstance(content, str):
        return Content(content or "")
    parts = [_part(part, f"{param}[{index}]", media) for index, part in enumerate(content)]
    return join_parts(parts, "" if role == "assistant" else "\n")


def text_of(content: PartContent, param: str) -> str:
    """Return the text of content that cannot have media, such as reasoning. Raises ApiError."""
    text, attachments = content_of(content, param, MediaReader())
    if attachments:
        raise bad_request(f"{param} can only have text.", param=param)
    return text


def _part(part: ContentPart | str, param: str, media: MediaReader) -> str | Attachment:
    if isinstance(part, str):
        return part
    match part.type:
        case "image_url" | "input_image":
            # OpenAI's chats have an object, its Responses API has a string.
            url = part.image_url.url if isinstance(part.image_url, MediaUrl) else part.image_url
            return media.media_from_url(_uploaded(url, part, param), f"{param}.image_url", "image")
        case "audio_url":
            url = part.audio_url.url if isinstance(part.audio_url, MediaUrl) else part.audio_url
            return media.media_from_url(url, f"{param}.audio_url", "audio")
        case "input_audio":
            audio = part.input_audio or InputAudio()
            return media.media_from_base64(audio.data, f"{param}.input_audio.data", "audio")
        case "file" | "input_file":
            file = part.file or InputFile(part.file_data, part.filename, part.file_url)
            path = f"{param}.file_data"
            if file.file_data is None and file.file_url is not None:
                data = media.data_from_url(file.file_url, f"{param}.file_url")
            else:
                data = media.data_from_base64(_uploaded(file.file_data, part, param), path)
            return media.file(data, file.filename or "", path)
    if part.type not in _TEXT_PARTS:
        raise bad_request(
            f"A part of type {part.type[:50]!r} cannot be read here; there are text, image_url, "
            "input_audio and file.",
            param=param,
        )
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise missing_field(f"{param}.text")
    return text


def _uploaded(value: str | None, part: ContentPart, param: str) -> str | None:
    """Return the value of a part. Raises ApiError for a part that refers to an uploaded file instead."""
    if value is None and (part.file_id or (part.file is not None and part.file.file_id)):
        raise bad_request(
            "This server stores no files: send the content as a data URL.", param=f"{param}.file_id"
        )
    return value


def check_text_size(messages: Sequence[Message], limits: ServerLimits) -> None:
    """Raise ApiError if the text of a conversation is larger than a body without media may be."""
    characters = sum(len(message.content) + len(message.reasoning) for message in messages)
    if characters > limits.body_bytes:
        raise ApiError(
            413, "request_too_large", f"The text is longer than {limits.body_bytes} characters."
        )
