"""Long pastes and files in a message that is being written: a short sign stands for the whole, until it is
sent or opened."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from localchat.chat.conversation import Inclusion
from localchat.errors import FileMissing, UsageError
from localchat.sanitize import sanitize, sanitize_line
from localchat.units import size

PASTE_CHARACTERS: Final = 8_000
PASTE_LINES: Final = 100
"""From here on a paste becomes a chip: a text area takes seconds for a line of a megabyte."""
_FILE_BYTES: Final = 8_000_000


class Attachment(NamedTuple):
    """`sign` stands in the text of the composer; `text` is what is sent in its place. `note`: what is to be
    known about it."""

    sign: str
    label: str
    text: str
    path: str = ""
    note: str = ""

    @property
    def size(self) -> str:
        """`12.3 kB`, of the text in UTF-8."""
        return size(len(self.text.encode("utf-8", "replace")))


class ComposerText(NamedTuple):
    """What stands in the composer: a text with signs, and what these stand for."""

    text: str = ""
    attachments: tuple[Attachment, ...] = ()


def is_long(text: str) -> bool:
    """Whether a paste is better a chip."""
    return len(text) > PASTE_CHARACTERS or text.count("\n") >= PASTE_LINES


def clean(text: str) -> str:
    """A paste as it may stand in the composer: line ends as newlines, nothing that moves a cursor."""
    return sanitize(text.replace("\r\n", "\n").replace("\r", "\n"))


def attachment_of_paste(text: str, number: int) -> Attachment:
    """A chip of a cleaned paste."""
    lines = text.removesuffix("\n").count("\n") + 1
    label = f"paste {number}, {lines:,} line{'' if lines == 1 else 's'}"
    return Attachment(f"⟦{label}⟧", label, text)


def attachment_of_file(path: Path, shown: str, taken: Iterable[str] = ()) -> Attachment:
    """A chip of a text file, as it will be sent: its name, then its text between fences. `shown`: its name
    there. Raises FileMissing, UsageError."""
    try:
        length = path.stat().st_size
        if length > _FILE_BYTES:
            raise UsageError(
                f"{shown} has {size(length)}", hint=f"up to {size(_FILE_BYTES)} can be included"
            )
        data = path.read_bytes()
    except OSError as problem:
        raise FileMissing(f"{shown} cannot be read: {problem.strerror or problem}") from problem
    if b"\0" in data:
        raise UsageError(f"{shown} is no text", hint="only text files can be included")
    text = data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
    fence = "`" * max(3, _longest_run(text) + 1)
    label = sanitize_line(shown)
    sign, number = f"⟦{label}⟧", 1
    while sign in taken:
        number += 1
        sign = f"⟦{label} {number}⟧"
    note = "" if _is_utf8(data) else "not UTF-8: what is unreadable was replaced"
    return Attachment(sign, label, f"{label}:\n{fence}\n{text.rstrip()}\n{fence}", str(path), note)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return False
    return True


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def expand(text: str, attachments: Sequence[Attachment]) -> tuple[str, tuple[Inclusion, ...]]:
    """The message that is sent: every sign replaced by what it stands for, and where that is."""
    parts: list[str] = []
    inclusions: list[Inclusion] = []
    at = length = 0
    for start, attachment in _places(text, attachments):
        parts += [text[at:start], attachment.text]
        length += start - at
        inclusions.append(
            Inclusion(attachment.label, length, length + len(attachment.text), attachment.path)
        )
        length += len(attachment.text)
        at = start + len(attachment.sign)
    return "".join((*parts, text[at:])), tuple(inclusions)


def contract(text: str, inclusions: Sequence[Inclusion]) -> ComposerText:
    """The other way: a message that was sent, with signs for what it includes."""
    parts: list[str] = []
    attachments: list[Attachment] = []
    at = 0
    for one in sorted(inclusions, key=lambda inclusion: inclusion.start):
        sign, number = f"⟦{one.label}⟧", 1
        while any(attachment.sign == sign for attachment in attachments):
            number += 1
            sign = f"⟦{one.label} {number}⟧"
        attachments.append(Attachment(sign, one.label, text[one.start : one.end], one.path))
        parts += [text[at : one.start], sign]
        at = one.end
    return ComposerText("".join((*parts, text[at:])), tuple(attachments))


def _places(text: str, attachments: Sequence[Attachment]) -> Iterator[tuple[int, Attachment]]:
    """Where the signs stand, in order; each counts once for every time it stands there."""
    found: list[tuple[int, Attachment]] = []
    for attachment in attachments:
        start = text.find(attachment.sign)
        while start >= 0:
            found.append((start, attachment))
            start = text.find(attachment.sign, start + len(attachment.sign))
    return iter(sorted(found, key=lambda place: place[0]))


def present(text: str, attachments: Sequence[Attachment]) -> tuple[Attachment, ...]:
    """The chips whose sign still stands in the text."""
    return tuple(attachment for attachment in attachments if attachment.sign in text)
