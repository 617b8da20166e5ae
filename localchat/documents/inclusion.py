"""Text of a file inside a message: its name, then its text between fences."""

from typing import Final

from localchat.documents.pages import kind_of, marked_text
from localchat.errors import UsageError
from localchat.media.binary_kind import binary_kind
from localchat.sanitize import fenced, sanitize_line, utf16_text

FORMATS: Final = ("pdf", "docx")
_HEAD_BYTES: Final = 1024


def file_text(name: str, data: bytes) -> str:
    """Return the text of a PDF, DOCX or text file with its name. Raises UsageError.

    HTML stays source text, because users often work on it.
    """
    return f"{sanitize_line(name)}:\n{fenced(_text_of(name, data).rstrip())}"


def _text_of(name: str, data: bytes) -> str:
    if kind_of(name, data[:_HEAD_BYTES]) in FORMATS:
        return marked_text(name, data)
    if (wide := utf16_text(data)) is not None:
        return wide
    if b"\0" in data:
        raise UsageError(
            f"{name} is {binary_kind(name, data)}, which cannot be read",
            hint="text, PDF and DOCX files, pictures and recordings can be included",
        )
    return data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
