"""Passages of documents, and the positions by which answers cite them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from localchat.documents.pages import DocumentText

LENGTH: Final = 1200
"""Maximum characters of a passage, about 300 tokens or a few paragraphs."""
_CUTS: Final = ("\n\n", "\n", ". ", " ")
"""Preferred ends of passages, best first."""


class Passage(NamedTuple):
    """A part of a file."""

    file: str
    """Name of the file in its collection."""
    number: int
    """Page number, or line number in plain text. 0 if the document has neither."""
    text: str

    @property
    def mark(self) -> str:
        """Citation of the passage, `[file:page]`."""
        if self.number:
            return f"[{self.file}:{self.number}]"
        return f"[{self.file}]"


def passages_of(file: str, document: "DocumentText") -> Iterator[Passage]:
    """Yield the passages of a document in order. A passage never spans two pages."""
    for page in document.pages:
        line = 0
        offset = 0
        for text in _cut(page.text):
            start = offset + len(text) - len(text.lstrip())
            line += page.text.count("\n", offset, start)
            if text.strip():
                number = line + 1 if document.by_line else page.number
                yield Passage(file, number, text.strip("\n"))
            line += text.count("\n", start - offset)
            offset += len(text)


def _cut(text: str) -> Iterator[str]:
    """Split a text into pieces of at most LENGTH characters."""
    start = 0
    while len(text) - start > LENGTH:
        end = start + LENGTH
        for cut in _CUTS:
            index = text.rfind(cut, start + LENGTH // 2, end)
            if index >= 0:
                end = index + len(cut)
                break
        yield text[start:end]
        start = end
    yield text[start:]


def marked_text(passages: Iterable[Passage]) -> str:
    """Return the passages in order, each below its mark."""
    parts: list[str] = []
    previous_mark = ""
    for passage in passages:
        if passage.mark != previous_mark:
            parts.append(f"\n{passage.mark}\n")
            previous_mark = passage.mark
        parts.append(f"{passage.text}\n")
    return "".join(parts).lstrip("\n")


def places(passages: Sequence[Passage]) -> str:
    """Return the positions of the passages, such as `a.pdf:3, a.pdf:7, b.md:12`."""
    return ", ".join(dict.fromkeys(passage.mark.strip("[]") for passage in passages))
