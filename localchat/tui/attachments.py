"""Long pastes and files in the composer, each shown as a short sign."""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from localchat.chat.conversation import Inclusion
from localchat.errors import FileMissing, UsageError
from localchat.sanitize import sanitize, sanitize_line, utf16_text
from localchat.units import size

MAX_PASTE_CHARACTERS: Final = 8_000
MAX_PASTE_LINES: Final = 100
"""A longer paste becomes an attachment: a text area takes seconds for a line of a megabyte."""
_MAX_FILE_BYTES: Final = 8_000_000
_FORMATS: Final = ("pdf", "docx")


class Attachment(NamedTuple):
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
    attachments: tuple[Attachment, ...] = ()


def is_long(text: str) -> bool:
    """Whether a paste should become an attachment."""
    return len(text) > MAX_PASTE_CHARACTERS or text.count("\n") >= MAX_PASTE_LINES


def clean(text: str) -> str:
    """Return a paste with newlines as line ends and with signs for control characters."""
    return sanitize(text.replace("\r\n", "\n").replace("\r", "\n"))


def attachment_of_paste(text: str, number: int) -> Attachment:
    """An attachment of a cleaned paste."""
    lines = text.removesuffix("\n").count("\n") + 1
    label = f"paste {number}, {lines:,} line{'' if lines == 1 else 's'}"
    return Attachment(f"⟦{label}⟧", label, text)


def attachment_of_file(path: Path, shown: str, taken: Collection[str] = ()) -> Attachment:
    """An attachment of a text, PDF or DOCX file: its name (`shown`), then its text between fences.

    Raises FileMissing, UsageError."""
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
    sign = _unused_sign(label, taken)
    is_plain = kind_of(path.name, data[:16]) not in _FORMATS
    note = "not UTF-8: unreadable characters were replaced"
    note = note if is_plain and not _is_utf8(data) and utf16_text(data) is None else ""
    return Attachment(sign, label, f"{label}:\n{fence}\n{text.rstrip()}\n{fence}", str(path), note)


def _text_of(path: Path, shown: str, data: bytes) -> str:
    """The text of a file; of HTML the source, because it is as often a file to work on. Raises UsageError."""
    from localchat.documents.binary_kind import binary_kind
    from localchat.documents.pages import Unreadable, kind_of, read_document

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


def _unused_sign(label: str, taken: Collection[str]) -> str:
    """A sign with this label that is not among those taken."""
    sign = f"⟦{label}⟧"
    number = 1
    while sign in taken:
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


def expand(text: str, attachments: Sequence[Attachment]) -> tuple[str, tuple[Inclusion, ...]]:
    """The message to send: signs replaced by their texts, and the positions of these."""
    parts: list[str] = []
    inclusions: list[Inclusion] = []
    at = length = 0
    for start, attachment in _sign_positions(text, attachments):
        parts += [text[at:start], attachment.text]
        length += start - at
        inclusions.append(
            Inclusion(attachment.label, length, length + len(attachment.text), attachment.path)
        )
        length += len(attachment.text)
        at = start + len(attachment.sign)
    return "".join((*parts, text[at:])), tuple(inclusions)


def contract(text: str, inclusions: Sequence[Inclusion]) -> ComposerText:
    """The reverse of `expand`: a sent message with signs for what it includes."""
    parts: list[str] = []
    attachments: list[Attachment] = []
    at = 0
    for one in sorted(inclusions, key=lambda inclusion: inclusion.start):
        sign = _unused_sign(one.label, [each.sign for each in attachments])
        attachments.append(Attachment(sign, one.label, text[one.start : one.end], one.path))
        parts += [text[at : one.start], sign]
        at = one.end
    return ComposerText("".join((*parts, text[at:])), tuple(attachments))


def _sign_positions(
    text: str, attachments: Sequence[Attachment]
) -> Iterator[tuple[int, Attachment]]:
    """Positions of all signs in order, also repeated ones."""
    found: list[tuple[int, Attachment]] = []
    for attachment in attachments:
        start = text.find(attachment.sign)
        while start >= 0:
            found.append((start, attachment))
            start = text.find(attachment.sign, start + len(attachment.sign))
    return iter(sorted(found, key=lambda place: place[0]))


def present(text: str, attachments: Sequence[Attachment]) -> tuple[Attachment, ...]:
    """The attachments whose sign is still in the text."""
    return tuple(attachment for attachment in attachments if attachment.sign in text)
