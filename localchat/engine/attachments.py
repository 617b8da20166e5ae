"""Makes, checks and moves the pictures and recordings of messages."""

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from localchat.config.paths import open_input
from localchat.engine.request import Attachment, Message
from localchat.errors import FileMissing, UsageError, reason
from localchat.media.format import HEAD_BYTES, media_format
from localchat.media.limits import MAX_ATTACHMENTS, MAX_FILE_BYTES, MAX_TOTAL_BYTES
from localchat.sanitize import sanitize_line
from localchat.units import size


class Content(NamedTuple):
    """Text of a message, with its attachments."""

    text: str = ""
    attachments: tuple[Attachment, ...] = ()


def make_attachment(data: bytes, name: str = "") -> Attachment:
    """Return the attachment of a picture or a recording. Its content decides which, not its name.

    Raises UsageError if the file is neither, is damaged in its header, or exceeds a limit of
    `media/limits.py`.
    """
    from localchat.media.decode import media_info

    return Attachment(media_info(data, name).format.kind, data, name=name)


def read_media(path: Path) -> Attachment:
    """Read a picture or a recording. Raises FileMissing, UsageError."""
    try:
        with open_input(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as problem:
        raise FileMissing(f"there is no file {path}") from problem
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {reason(problem)}") from problem
    return make_attachment(data, path.name)


def check_attachments(messages: Iterable[Message]) -> None:
    """Check the count, the total size and the positions. Raises UsageError."""
    count = total_bytes = 0
    for message in messages:
        for attachment in message.attachments:
            count += 1
            total_bytes += len(attachment.data)
            if not 0 <= attachment.position <= len(message.content):
                raise UsageError(
                    f"{attachment.name or 'an attachment'} has position {attachment.position}"
                    f" in a message of {len(message.content)} characters"
                )
    if count > MAX_ATTACHMENTS:
        raise UsageError(
            f"the conversation has {count} pictures and recordings",
            hint=f"up to {MAX_ATTACHMENTS} can be sent",
        )
    if total_bytes > MAX_TOTAL_BYTES:
        raise UsageError(
            f"the pictures and recordings of the conversation have {size(total_bytes)} together",
            hint=f"up to {size(MAX_TOTAL_BYTES)} can be sent",
        )


def join_parts(parts: Iterable[str | Attachment], separator: str = "\n") -> Content:
    """Join the parts of a message. The separator stands between neighboring texts only.

    llama.cpp's server joins parts in the same way, so that a template renders the same prompt.
    """
    texts: list[str] = []
    attachments: list[Attachment] = []
    length = 0
    follows_text = False
    for part in parts:
        if isinstance(part, Attachment):
            attachments.append(msgspec.structs.replace(part, position=length))
            follows_text = False
            continue
        text = f"{separator}{part}" if follows_text else part
        texts.append(text)
        length += len(text)
        follows_text = True
    return Content("".join(texts), tuple(attachments))


def moved(attachments: Sequence[Attachment], characters: int) -> tuple[Attachment, ...]:
    """Return attachments of a text that now starts this many characters later."""
    return tuple(
        msgspec.structs.replace(attachment, position=attachment.position + characters)
        for attachment in attachments
    )


def data_url(attachment: Attachment) -> str:
    """Return the file as a data URL."""
    format_ = media_format(attachment.data[:HEAD_BYTES])
    media_type = format_.media_type if format_ else "application/octet-stream"
    return f"data:{media_type};base64,{base64_text(attachment.data)}"


def base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def attached_sentence(attachment: Attachment) -> str:
    """Return a sentence such as `chart.png is attached (640x480)`."""
    from localchat.media.decode import media_info

    label = media_info(attachment.data, attachment.name).label
    return f"{sanitize_line(attachment.name) or attachment.kind} is attached ({label})"


def described_content(message: Message) -> str:
    """Return the content with `[image: chart.png]` in the place of each attachment."""
    parts = []
    end = 0
    for attachment in message.attachments:
        parts += [message.content[end : attachment.position], _description(attachment)]
        end = attachment.position
    return "".join((*parts, message.content[end:]))


def _description(attachment: Attachment) -> str:
    if attachment.name:
        return f"[{attachment.kind}: {sanitize_line(attachment.name)}]"
    return f"[{attachment.kind}]"


def append_content(message: Message, other: Message, separator: str) -> Message:
    """Append the text and the attachments of another message to a message."""
    text = message.content
    if text and other.content:
        text += separator
    return msgspec.structs.replace(
        message,
        content=text + other.content,
        attachments=(*message.attachments, *moved(other.attachments, len(text))),
    )


def prepend_text(message: Message, text: str) -> Message:
    """Put a text before the content of a message."""
    return msgspec.structs.replace(
        message,
        content=text + message.content,
        attachments=moved(message.attachments, len(text)),
    )
