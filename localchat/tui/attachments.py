"""Long pastes and files in the composer, each shown as a short sign."""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from localchat.chat.conversation import Inclusion
from localchat.errors import FileMissing, UsageError
from localchat.sanitize import sanitize, sanitize_line, utf16_text
from localchat.units import counted, size

MAX_PASTE_CHARACTERS: Final = 8_000
MAX_PASTE_LINES: Final = 100
"""A longer paste becomes an attachment: a text area takes seconds for a line of a megabyte."""
_MAX_FILE_BYTES: Final = 8_000_000
_FORMATS: Final = ("pdf", "docx")


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

    @property
    def size(self) -> str:
        """`12.3 kB`, of the text in UTF-8."""
        return size(len(self.text.encode("utf-8", "replace")))


class ComposerText(NamedTuple):
    """A text with signs, and the attachments that they stand for."""

    text: str = ""
    attachments: tuple[ComposerAttachment, ...] = ()


def is_long(text: str) -> bool:
    """Whether a paste should become an attachment."""
    return len(text) > MAX_PASTE_CHARACTERS or text.count("\n") >= MAX_PASTE_LINES


def clean(text: str) -> str:
    """Return a paste with newlines as line ends and with signs for control characters."""
    return sanitize(text.replace("\r\n", "\n").replace("\r", "\n"))


def attachment_of_paste(text: str, number: int) -> ComposerAttachment:
    """Return the attachment of a cleaned paste."""
    lines = text.removesuffix("\n").count("\n") + 1
    label = f"paste {number}, {counted(lines, 'line')}"
    return ComposerAttachment(f"⟦{label}⟧", label, text)


def attachment_of_file(
    path: Path, shown: str, used_signs: Collection[str] = ()
) -> ComposerAttachment:
    """Return the attachment of a text, PDF or DOCX file.

    It has the file's name (`shown`), then its text between fences. Raises FileMissing, UsageError.
    """
    from localchat.documents.pages import kind_of  # html, xml and zip, which take time to import

    try:
        length = path.stat().st_size
        if length > _MAX_FILE_BYTES:
            raise UsageError(
                f"{shown} has {size(length)}", hint=f"up to {size(_MAX_FILE_BYTES)} can be included"
            )
        data = path.read_bytes()
    except OSError as problem:
        raise FileMissing(f"{shown} cannot be read: {problem.strerror or problem}") from problem
    text = _text_of(path, shown, data)
    fence = "`" * max(3, _longest_run(text) + 1)
    label = sanitize_line(shown)
    sign = _unused_sign(label, used_signs)
    is_plain = kind_of(path.name, data[:16]) not in _FORMATS
    note = ""
    if is_plain and not _is_utf8(data) and utf16_text(data) is None:
        note = "not UTF-8: unreadable characters were replaced"
    return ComposerAttachment(
        sign, label, f"{label}:\n{fence}\n{text.rstrip()}\n{fence}", str(path), note
    )


def _text_of(path: Path, shown: str, data: bytes) -> str:
    """Return the text of a file. Raises UsageError.

    HTML stays source text, because users often work on it.
    """
    from localchat.documents.pages import Unreadable, kind_of, read_document
    from localchat.media.binary_kind import binary_kind

    if kind_of(path.name, data[:16]) in _FORMATS:
        try:
            return read_document(path.name, data).marked()
        except Unreadable as problem:
            raise UsageError(f"{shown} {problem.message}", hint=problem.hint) from problem
    if (wide := utf16_text(data)) is not None:
        return wide
    if b"\0" in data:
        raise UsageError(
            f"{shown} is {binary_kind(path.name, data)}, and the model reads text only",
            hint="text, PDF and DOCX files can be included",
        )
    return data.decode("utf-8-sig", "replace").replace("\r\n", "\n")


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


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def expand(
    text: str, attachments: Sequence[ComposerAttachment]
) -> tuple[str, tuple[Inclusion, ...]]:
    """Return the message to send with texts in place of signs, and their positions."""
    parts: list[str] = []
    inclusions: list[Inclusion] = []
    end = length = 0
    for start, attachment in _sign_positions(text, attachments):
        parts += [text[end:start], attachment.text]
        length += start - end
        inclusions.append(
            Inclusion(attachment.label, length, length + len(attachment.text), attachment.path)
        )
        length += len(attachment.text)
        end = start + len(attachment.sign)
    return "".join((*parts, text[end:])), tuple(inclusions)


def contract(text: str, inclusions: Sequence[Inclusion]) -> ComposerText:
    """Reverse `expand`: replace the included texts of a sent message by signs."""
    parts: list[str] = []
    attachments: list[ComposerAttachment] = []
    end = 0
    for inclusion in sorted(inclusions, key=lambda inclusion: inclusion.start):
        sign = _unused_sign(inclusion.label, [attachment.sign for attachment in attachments])
        included = text[inclusion.start : inclusion.end]
        attachments.append(ComposerAttachment(sign, inclusion.label, included, inclusion.path))
        parts += [text[end : inclusion.start], sign]
        end = inclusion.end
    return ComposerText("".join((*parts, text[end:])), tuple(attachments))


def _sign_positions(
    text: str, attachments: Sequence[ComposerAttachment]
) -> Iterator[tuple[int, ComposerAttachment]]:
    """Return the positions of all signs in order, also repeated ones."""
    positions: list[tuple[int, ComposerAttachment]] = []
    for attachment in attachments:
        start = text.find(attachment.sign)
        while start >= 0:
            positions.append((start, attachment))
            start = text.find(attachment.sign, start + len(attachment.sign))
    return iter(sorted(positions, key=lambda position: position[0]))


def present(text: str, attachments: Sequence[ComposerAttachment]) -> tuple[ComposerAttachment, ...]:
    """Return the attachments whose sign is still in the text."""
    return tuple(attachment for attachment in attachments if attachment.sign in text)
