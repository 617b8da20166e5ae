"""Reads documents to pages of text: PDF, DOCX, HTML, and plain text such as Markdown.

pypdf reads PDF files; the standard library reads everything else.
"""

import io
import re
import time
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import PurePath
from typing import Final, NamedTuple
from xml.etree import ElementTree

from localchat.errors import UsageError
from localchat.media.binary_kind import binary_kind
from localchat.sanitize import utf16_encoding, utf16_text

MAX_FILE_BYTES: Final = 64 << 20
MAX_TEXT: Final = 64 << 20
"""Maximum characters to read from one file."""
PDF_S: Final = 30.0
"""CPU time for a PDF file, besides `PDF_S_PER_MB`. Ordinary pages take some 20 ms."""
PDF_S_PER_MB: Final = 10.0
_HEAD_BYTES: Final = 8192
_HTML_SUFFIXES: Final = (".html", ".htm", ".xhtml")
_INLINE_TAGS: Final = """
a abbr b bdi bdo cite code data del dfn em font i img ins kbd label mark q s samp small span strong sub sup
time u var wbr
"""
_WORD: Final = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK: Final = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"


class Page(NamedTuple):
    """A page of a document."""

    number: int
    """Page number from 1, or 0 if the document has no pages."""
    text: str


class DocumentText(NamedTuple):
    """The text of a file."""

    pages: tuple[Page, ...]
    by_line: bool = False
    """Whether positions are lines, because plain text has no pages."""

    def marked(self) -> str:
        """Return the whole text. If there are several pages, each starts with its number."""
        if len(self.pages) == 1:
            return self.pages[0].text
        return "\n\n".join(f"[page {page.number}]\n{page.text.strip()}" for page in self.pages)


class Unreadable(UsageError):
    """Raised for unreadable files. `message` is the end of a sentence that starts with the file name."""


def kind_of(name: str, head: bytes) -> str:
    """Return `pdf`, `docx`, `html`, `binary` or `text`.

    Depends on the name of a file and its first bytes.
    """
    suffix = PurePath(name).suffix.lower()
    if head.startswith(b"%PDF-"):
        return "pdf"
    if suffix == ".docx" and head.startswith(b"PK"):
        return "docx"
    if suffix in _HTML_SUFFIXES or re.match(rb"\s*(<!doctype html|<html)", head, re.IGNORECASE):
        return "html"
    if b"\0" in head[:_HEAD_BYTES] and utf16_encoding(head) is None:
        return "binary"
    return "text"


def read_document(name: str, data: bytes) -> DocumentText:
    """Return the text of a file. Raises Unreadable."""
    if len(data) > MAX_FILE_BYTES:
        raise Unreadable(f"has more than {MAX_FILE_BYTES >> 20} MB")
    match kind_of(name, data[:_HEAD_BYTES]):
        case "pdf":
            return DocumentText(_bounded(_pdf_pages(data)))
        case "docx":
            return DocumentText(_bounded(_docx_pages(data)))
        case "html":
            return DocumentText((Page(0, _html_text(decoded(data))),))
        case "binary":
            raise Unreadable(f"is {binary_kind(name, data)}")
    text = decoded(data)
    if "\0" in text:
        raise Unreadable(f"is {binary_kind(name, data)}")
    return DocumentText((Page(0, text),), by_line=True)


def marked_text(name: str, data: bytes) -> str:
    """Return the text of a file (see DocumentText.marked). Raises UsageError with its name."""
    try:
        return read_document(name, data).marked()
    except Unreadable as problem:
        raise UsageError(f"{name} {problem.message}", hint=problem.hint) from problem


def decoded(data: bytes) -> str:
    """Decode UTF-8 or UTF-16, otherwise the charset that an HTML page names, otherwise Windows-1252."""
    text = utf16_text(data)
    if text is not None:
        return text
    charsets = ["utf-8-sig"]
    if match := re.search(rb"charset=[\"']?([\w-]+)", data[:_HEAD_BYTES]):
        charsets.append(match[1].decode("ascii", "replace"))
    for charset in charsets:
        try:
            return data.decode(charset).replace("\r\n", "\n")
        except (UnicodeDecodeError, LookupError):
            continue
    return data.decode("cp1252", "replace").replace("\r\n", "\n")


def _bounded(pages: Iterator[Page]) -> tuple[Page, ...]:
    """Return the pages that have text. Raises Unreadable for no text or too much text."""
    non_empty = []
    length = 0
    for page in pages:
        length += len(page.text)
        if length > MAX_TEXT:
            raise Unreadable(f"has more than {MAX_TEXT >> 20} million characters")
        if page.text.strip():
            non_empty.append(page)
    if not non_empty:
        raise Unreadable("has no text; its pages may be scanned images")
    return tuple(non_empty)


def _pdf_pages(data: bytes) -> Iterator[Page]:
    import logging

    import pypdf

    # pypdf logs a line for each oddity of a file.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        limit = _TimeLimit(PDF_S + PDF_S_PER_MB * len(data) / 1e6)
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("is protected by a password")
        for number, page in enumerate(reader.pages, 1):
            limit.check()
            yield Page(number, page.extract_text(visitor_operand_before=limit.check))
    except Unreadable:
        raise
    except Exception as problem:
        cause = f"{type(problem).__name__}: {problem}"
        raise Unreadable(f"is a damaged PDF file ({cause:.120})") from problem


class _TimeLimit:
    """Limit of this thread's CPU time.

    A PDF file can have the same page a million times, and drawings that contain each other ten times over.
    """

    def __init__(self, limit_s: float) -> None:
        self._deadline_s = time.thread_time() + limit_s

    def check(self, *_: object) -> None:
        """Raise Unreadable beyond the limit. pypdf calls it before each operator of a page."""
        if time.thread_time() > self._deadline_s:
            raise Unreadable("is a PDF file that takes too long to read")


def _docx_pages(data: bytes) -> Iterator[Page]:
    try:
        with (
            zipfile.ZipFile(io.BytesIO(data)) as archive,
            archive.open("word/document.xml") as file,
        ):
            xml = file.read(MAX_TEXT + 1)
        if len(xml) > MAX_TEXT:
            raise Unreadable("is too large when unpacked")
        root = ElementTree.fromstring(xml)  # noqa: S314 - expat bounds the growth of entities
        yield from _word_pages(root)
    except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError, EOFError) as problem:
        raise Unreadable("is a damaged or protected DOCX file") from problem
    except (ElementTree.ParseError, OSError, ValueError) as problem:
        raise Unreadable("is a damaged DOCX file") from problem


def _word_pages(root: ElementTree.Element) -> Iterator[Page]:
    """Yield the pages, or a single page 0.

    Page breaks are those that Word saved, otherwise those that the author set.
    """
    saved = root.find(f".//{_WORD}lastRenderedPageBreak") is not None
    number = 1
    parts = [""]
    for element in _elements(root):
        match element.tag.removeprefix(_WORD):
            case "p":
                parts.append("\n\n")
            case "t":
                parts.append(element.text or "")
            case "tab":
                parts.append("\t")
            case "br" if element.get(f"{_WORD}type") != "page":
                parts.append("\n")
            case "lastRenderedPageBreak" | "br" if saved == element.tag.endswith("PageBreak"):
                yield Page(number, "".join(parts).strip("\n"))
                number += 1
                parts = []
    yield Page(number if number > 1 or saved else 0, "".join(parts).strip("\n"))


def _elements(element: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """Yield all elements in order, without fallbacks for older programs and tabs of paragraph styles."""
    if element.tag in (_FALLBACK, f"{_WORD}pPr"):
        return
    yield element
    for child in element:
        yield from _elements(child)


class _PageText(HTMLParser):
    """Collects the visible text of a page."""

    _HIDDEN = frozenset({"script", "style", "noscript", "template", "svg"})
    _INLINE = frozenset(_INLINE_TAGS.split())

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0
        self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in self._HIDDEN
        self._preformatted += tag == "pre"
        self._break(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in self._HIDDEN))
        self._preformatted = max(0, self._preformatted - (tag == "pre"))
        self._break(tag)

    def _break(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.parts.append("\t")
        elif tag not in self._INLINE and not self._hidden:
            self.parts.append("\n" if tag in ("br", "tr", "li", "pre") else "\n\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data if self._preformatted else re.sub(r"\s+", " ", data))


def _html_text(markup: str) -> str:
    parser = _PageText()
    parser.feed(markup)
    parser.close()
    text = re.sub(r"[ \t]*\n ?(?! )", "\n", "".join(parser.parts))
    return re.sub(r"\n{3,}", "\n\n", text).strip()
