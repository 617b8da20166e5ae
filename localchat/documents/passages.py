"""Passages of documents: where they stand, and how they are cut."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from localchat.documents.pages import DocumentText

LENGTH: Final = 1200
"""Most characters of a passage: some 300 tokens, a few paragraphs."""
_CUTS: Final = ("\n\n", "\n", ". ", " ")
"""Ends of passages, best first."""


class Passage(NamedTuple):
    """A part of a file."""

    file: str
    """Name of the file in its collection."""
    number: int
    """Page, or line of a plain text; 0 where there is neither."""
    text: str

    @property
    def mark(self) -> str:
        """`[file:page]`, as it is cited."""
        if self.number:
            return f"[{self.file}:{self.number}]"
        return f"[{self.file}]"


def passages_of(file: str, document: "DocumentText") -> Iterator[Passage]:
    """The passages of a document in order; each lies within one page."""
    for page in document.pages:
        line = at = 0
        for text in _cut(page.text):
            start = at + len(text) - len(text.lstrip())
            line += page.text.count("\n", at, start)
            if text.strip():
                number = line + 1 if document.by_line else page.number
                yield Passage(file, number, text.strip("\n"))
            line += text.count("\n", start - at)
            at += len(text)


def _cut(text: str) -> Iterator[str]:
    """Pieces of at most LENGTH that together are the text."""
    at = 0
    while len(text) - at > LENGTH:
        end = at + LENGTH
        for cut in _CUTS:
            found = text.rfind(cut, at + LENGTH // 2, end)
            if found >= 0:
                end = found + len(cut)
                break
        yield text[at:end]
        at = end
    yield text[at:]


def marked_text(passages: Iterable[Passage]) -> str:
    """The passages in order, each place under its mark."""
    parts: list[str] = []
    before = ""
    for passage in passages:
        if passage.mark != before:
            parts.append(f"\n{passage.mark}\n")
            before = passage.mark
        parts.append(f"{passage.text}\n")
    return "".join(parts).lstrip("\n")


def places(passages: Sequence[Passage]) -> str:
    """`a.pdf:3, a.pdf:7, b.md:12`."""
    return ", ".join(dict.fromkeys(passage.mark.strip("[]") for passage in passages))
