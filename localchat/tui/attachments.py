"""Long pastes and files in the composer, each shown as a short sign."""

import re
from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from localchat.chat.conversation import Inclusion, Node, Question
from localchat.engine.attachments import read_media
from localchat.engine.request import Attachment
from localchat.errors import FileMissing, UsageError, os_errors_as
from localchat.sanitize import sanitize, sanitize_line, utf16_text
from localchat.session.named_media import media_path
from localchat.units import counted, size

MAX_PASTE_CHARACTERS: Final = 8_000
MAX_PASTE_LINES: Final = 100
"""A longer paste becomes an attachment: a text area takes seconds for a line of a megabyte."""
_MAX_FILE_BYTES: Final = 8_000_000


class ComposerAttachment(NamedTuple):
    """A file or a long paste in a message."""

    sign: str
    """Its place in the text of the composer."""
    label: str
    text: str
    """The text that is sent instead of the sign."""
    path: str = ""
    note: str = ""
    """A warning to the user."""
    media: Attachment | None = None
    """A picture or a recording, which is sent instead of a text."""

    @property
    def size(self) -> str:
        """`12.3 kB`, of the media or of the text in UTF-8."""
        if self.media is not None:
            return size(len(self.media.data))
        return size(len(self.text.encode("utf-8", "replace")))


class ComposerText(NamedTuple):
    """A text with signs, and the attachments that they stand for."""

    text: str = ""
    attachments: tuple[ComposerAttachment, ...] = ()


def is_long(text: str) -> bool:
    """Whether a paste should become an attachment."""
    return len(text) > MAX_PASTE_CHARACTERS or text.count("\n") >= MAX_PASTE_LINES


def clean(text: str) -> str:
    """Return a text with newlines as line ends and with signs for control characters."""
    return sanitize(text.replace("\r\n", "\n").replace("\r", "\n"))


def attachment_of_paste(text: str, number: int) -> ComposerAttachment:
    """Return the attachment of a cleaned paste."""
    lines = text.removesuffix("\n").count("\n") + 1
    label = f"paste {number}, {counted(lines, 'line')}"
    return ComposerAttachment(f"⟦{label}⟧", label, text)


def attachment_of_file(
    path: Path, shown: str, used_signs: Collection[str] = ()
) -> ComposerAttachment:
    """Return the attachment of a picture, a recording, or a text, PDF or DOCX file.

    A text has the file's name (`shown`), then its text between fences. Raises FileMissing, UsageError.
    """
    from localchat.documents.inclusion import FORMATS, file_text
    from localchat.documents.pages import kind_of  # html, xml and zip, which take time to import

    if media_path(str(path)) is not None:
        return attachment_of_media(read_media(path), used_signs, str(path))
    with os_errors_as(FileMissing, f"{shown} cannot be read"):
        length = path.stat().st_size
        if length > _MAX_FILE_BYTES:
            raise UsageError(
                f"{shown} has {size(length)}", hint=f"up to {size(_MAX_FILE_BYTES)} can be included"
            )
        data = path.read_bytes()
    text = file_text(shown, data)
    label = sanitize_line(shown)
    is_plain = kind_of(path.name, data[:16]) not in FORMATS
    note = ""
    if is_plain and not _is_utf8(data) and utf16_text(data) is None:
        note = "not UTF-8: unreadable characters were replaced"
    return ComposerAttachment(_unused_sign(label, used_signs), label, text, str(path), note)


def attachment_of_media(
    media: Attachment, used_signs: Collection[str] = (), path: str = ""
) -> ComposerAttachment:
    """Return the attachment of a picture or a recording. Raises UsageError for a damaged one."""
    from localchat.media.decode import media_info

    kind = {"image": "Image", "audio": "Recording"}[media.kind]
    name = sanitize_line(media.name) or "pasted"
    label = f"{kind}: {name} {media_info(media.data, media.name).label}"
    return ComposerAttachment(_unused_sign(label, used_signs), label, "", path, media=media)


def _unused_sign(label: str, used_signs: Collection[str]) -> str:
    """Return a sign with this label that is not used yet."""
    sign = f"⟦{label}⟧"
    number = 1
    while sign in used_signs:
        number += 1
        sign = f"⟦{label} {number}⟧"
    return sign


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return False
    return True


def expand(text: str, attachments: Sequence[ComposerAttachment]) -> Question:
    """Return the message to send, with texts and media instead of their signs."""
    parts: list[str] = []
    inclusions: list[Inclusion] = []
    media: list[Attachment] = []
    end = length = 0
    for start, attachment in _sign_positions(text, attachments):
        parts += [text[end:start], attachment.text]
        length += start - end
        end = start + len(attachment.sign)
        if attachment.media is not None:
            media.append(msgspec.structs.replace(attachment.media, position=length))
            continue
        inclusions.append(
            Inclusion(attachment.label, length, length + len(attachment.text), attachment.path)
        )
        length += len(attachment.text)
    return Question("".join((*parts, text[end:])), tuple(inclusions), tuple(media))


def contract(question: Question) -> ComposerText:
    """Reverse `expand`: replace the included texts and media of a sent message by signs."""
    text = question.text
    parts: list[str] = []
    attachments: list[ComposerAttachment] = []
    end = 0
    items: list[tuple[int, int, Inclusion | Attachment]] = [
        *((item.start, item.end, item) for item in question.inclusions),
        *((item.position, item.position, item) for item in question.attachments),
    ]
    for start, stop, item in sorted(items, key=lambda entry: entry[:2]):
        signs = [attachment.sign for attachment in attachments]
        if isinstance(item, Attachment):
            attachment = attachment_of_media(item, signs)
        else:
            sign = _unused_sign(item.label, signs)
            attachment = ComposerAttachment(sign, item.label, text[start:stop], item.path)
        attachments.append(attachment)
        parts += [text[end:start], attachment.sign]
        end = stop
    return ComposerText("".join((*parts, text[end:])), tuple(attachments))


def joined(parts: Iterable[ComposerText]) -> ComposerText:
    """Join texts with blank lines between them. Repeated signs get numbers."""
    texts: list[str] = []
    attachments: list[ComposerAttachment] = []
    for text, own in parts:
        used = {attachment.sign for attachment in attachments}
        for attachment in own:
            sign = attachment.sign
            if sign in used:
                signs = (*own, *attachments)
                sign = _unused_sign(attachment.label, [other.sign for other in signs])
                text = text.replace(attachment.sign, sign)
            attachments.append(attachment._replace(sign=sign))
        texts.append(text)
    return ComposerText("\n\n".join(filter(None, texts)), tuple(attachments))


def question_of(node: Node) -> Question:
    """Return a sent message as a question."""
    return Question(node.message.content, node.inclusions, node.message.attachments)


def _sign_positions(
    text: str, attachments: Sequence[ComposerAttachment]
) -> list[tuple[int, ComposerAttachment]]:
    """Return the positions of all signs in order, also repeated ones."""
    positions = [
        (match.start(), attachment)
        for attachment in attachments
        for match in re.finditer(re.escape(attachment.sign), text)
    ]
    return sorted(positions, key=itemgetter(0))


def present(text: str, attachments: Sequence[ComposerAttachment]) -> tuple[ComposerAttachment, ...]:
    """Return the attachments whose sign is still in the text."""
    return tuple(attachment for attachment in attachments if attachment.sign in text)
