"""Names of files that are not text."""

import pytest

from localchat.media.binary_kind import binary_kind


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("a", b"\x89PNG\r\n\x1a\n", "a PNG image"),
        ("a.jpg", b"\xff\xd8\xff\xe0", "a JPEG image"),
        ("a.webp", b"RIFF\0\0\0\0WEBPVP8 ", "a WebP image"),
        ("a.wav", b"RIFF\0\0\0\0WAVEfmt ", "a WAV recording"),
        ("a.mp4", b"\0\0\0\x18ftypisom", "a video"),
        ("a.heic", b"\0\0\0\x18ftypheic", "a HEIC or AVIF image"),
        ("table.XLSX", b"PK\x03\x04", "an Excel file"),
        ("a.zip", b"PK\x03\x04", "a zip archive"),
        ("a", b"\x7fELF", "a program"),
        ("a", b"\0\1\2\3", "a binary file"),
        ("a", b"", "a binary file"),
    ],
)
def test_the_first_bytes_name_the_kind(name: str, head: bytes, kind: str) -> None:
    assert binary_kind(name, head) == kind
