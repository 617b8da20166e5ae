"""Text of a file inside a message: its name, then its text between fences."""

import re
from typing import Final

from localchat.documents.pages import Unreadable, kind_of, read_document
from localchat.errors import UsageError
from localchat.media.binary_kind import binary_kind
from localchat.sanitize import sanitize_line, utf16_text

FORMATS: Final = ("pdf", "docx")
_HEAD_BYTES: Final = 1024


def file_text(name: str, data: bytes) -> str:
    """Return the text of a PDF, DOCX or text file with its name. Raises UsageError.

    HTML stays source text, because users often work on it.
    """
    text = _text_of(name, data)
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{sanitize_line(name)}:\n{fence}\n{text.rstrip()}\n{fence}"


def _text_of(name: str, data: bytes) -> str:
    if kind_of(name, data[:_HEAD_BYTES]) in FORMATS:
        try:
            return read_document(name, data).marked()
        except Unreadable as problem:
            raise UsageError(f"{name} {problem.message}", hint=problem.hint) from problem
    if (wide := utf16_text(data)) is not None:
        return wide
    if b"\0" in data:
        raise UsageError(
            f"{name} is {binary_kind(name, data)}, which cannot be read",
            hint="text, PDF and DOCX files, pictures and recordings can be included",
        )
    return data.decode("utf-8-sig", "replace").replace("\r\n", "\n")


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
