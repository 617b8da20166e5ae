"""Documents become pages of text: PDF, DOCX, HTML and plain text; what cannot be read says why."""

import io
import zipfile
from types import SimpleNamespace

import pytest

from localchat.documents import pages
from localchat.documents.pages import DocumentText, Page, Unreadable, kind_of, read_document

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def docx(body: str) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(
            "word/document.xml",
            f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>',
        )
    return made.getvalue()


def pdf(*pages: str) -> bytes:
    """A PDF file with one line of text a page."""
    kids = " ".join(f"{4 + 2 * at} 0 R" for at in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for at, text in enumerate(pages):
        shown = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        objects += [
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F1 3 0 R >> >> "
            f"/Contents {5 + 2 * at} 0 R >>",
            f"<< /Length {len(shown)} >>\nstream\n{shown}\nendstream",
        ]
    made, places = "%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(made))
        made += f"{number} 0 obj\n{one}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    return (
        f"{made}xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n"
        f"startxref\n{len(made)}\n%%EOF\n"
    ).encode("latin-1")


def test_pages_of_a_pdf_keep_their_numbers_and_empty_ones_are_left_out() -> None:
    pages = read_document("a.pdf", pdf("The first.", "", "The third.")).pages
    assert [(page.number, page.text.strip()) for page in pages] == [
        (1, "The first."),
        (3, "The third."),
    ]


@pytest.mark.parametrize(
    "data",
    [pdf("One.")[:-200], b"%PDF-1.7\n", pdf("One.").replace(b"obj", b"o")],
    ids=["cut", "empty", "objects"],
)
def test_a_damaged_pdf_says_so(data: bytes) -> None:
    with pytest.raises(Unreadable) as told:
        read_document("a.pdf", data)
    assert "damaged" in told.value.message or "no text" in told.value.message


def test_a_pdf_beyond_its_time_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PDF_S", -1.0)
    with pytest.raises(Unreadable, match="takes too long to read"):
        read_document("a.pdf", pdf("One."))


def test_a_pdf_page_that_takes_too_long_ends_at_its_next_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 0.0])
    monkeypatch.setattr(
        pages, "time", SimpleNamespace(thread_time=lambda: next(times, 1_000_000.0))
    )
    with pytest.raises(Unreadable, match="takes too long to read"):
        read_document("a.pdf", pdf("One."))


def test_a_pdf_without_text_says_that_it_may_be_scanned() -> None:
    with pytest.raises(Unreadable, match="scanned"):
        read_document("a.pdf", pdf("", ""))


def test_a_docx_has_the_pages_that_word_saved() -> None:
    body = (
        '<w:p><w:pPr><w:tabs><w:tab w:val="left"/></w:tabs></w:pPr><w:r><w:t>One</w:t><w:tab/>'
        '<w:t>&amp; two</w:t></w:r></w:p><w:p><w:r><w:br w:type="page"/></w:r></w:p>'
        "<w:p><w:r><w:lastRenderedPageBreak/><w:t>Three</w:t></w:r></w:p>"
    )
    assert read_document("a.docx", docx(body)).pages == (Page(1, "One\t& two"), Page(2, "Three"))


def test_a_docx_has_the_pages_of_its_writer_or_none() -> None:
    broken = '<w:p><w:t>One</w:t></w:p><w:p><w:br w:type="page"/><w:t>Two</w:t></w:p>'
    assert read_document("a.docx", docx(broken)).pages == (Page(1, "One"), Page(2, "Two"))
    assert read_document("a.docx", docx("<w:p><w:t>One</w:t></w:p>")).pages == (Page(0, "One"),)


# Named, because an archive holds the time it was made at: workers would collect different tests.
@pytest.mark.parametrize(
    "data",
    [b"PK\x03\x04broken", docx("<w:p>"), docx("<w:p>" * 5000 + "</w:p>" * 5000)],
    ids=["archive", "xml", "depth"],
)
def test_a_damaged_docx_says_so(data: bytes) -> None:
    with pytest.raises(Unreadable, match="damaged"):
        read_document("a.docx", data)


def test_html_becomes_what_a_reader_sees() -> None:
    markup = (
        "<!doctype html><head><title>Title</title><style>p {}</style><script>if (a<b) x()</script>"
        "<body><h1>Head</h1><p>A <b>bold</b>\n word &amp; more<p>next<br>line"
        "<table><tr><td>a<td>b</tr></table><pre>x\n  y</pre>"
    )
    (page,) = read_document("a.html", markup.encode()).pages
    assert page.number == 0
    assert page.text == "Title\n\nHead\n\nA bold word & more\n\nnext\nline\n\n\ta\tb\n\nx\n  y"


def test_text_is_decoded_as_it_was_written() -> None:
    for data in ("Grüße\r\n".encode(), "Grüße\n".encode("utf-16"), "Grüße\n".encode("cp1252")):
        assert read_document("a.txt", data) == DocumentText((Page(0, "Grüße\n"),), by_line=True)
    with pytest.raises(Unreadable, match="is a binary file"):
        read_document("a.txt", b"\xff\xfea\0\0\0")
    page = '<html><meta charset="iso-8859-5">Привет'.encode("iso-8859-5")
    assert read_document("a.htm", page).pages[0].text == "Привет"


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("a", b"%PDF-1.7", "pdf"),
        ("a.docx", b"PK\x03\x04\0", "docx"),
        ("a.zip", b"PK\x03\x04\0", "binary"),
        ("a.md", b"# Title", "text"),
        ("page", b"\n<!DOCTYPE HTML><p>", "html"),
        ("a.txt", b"", "text"),
    ],
)
def test_the_kind_of_a_file_is_seen_in_its_first_bytes(name: str, head: bytes, kind: str) -> None:
    assert kind_of(name, head) == kind
