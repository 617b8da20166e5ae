"""Names the kind of a binary file by its first bytes."""

from pathlib import PurePath
from typing import Final

_MAGIC: Final = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"BM", "a BMP image"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"\0\0\x01\0", "an icon"),
    (b"\xff\n", "a JPEG XL image"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 image"),
    (b"8BPS", "a Photoshop file"),
    (b"%PDF", "a PDF file"),
    (b"ID3", "an MP3 recording"),
    (b"\xff\xfb", "an MP3 recording"),
    (b"OggS", "an Ogg recording"),
    (b"fLaC", "a FLAC recording"),
    (b"FORM", "an AIFF recording"),
    (b".snd", "an AU recording"),
    (b"caff", "a CAF recording"),
    (b"\x1aE\xdf\xa3", "a video"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"(\xb5/\xfd", "a zstd archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"SQLite format 3", "an SQLite database"),
    (b"GGUF", "a model file"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a Windows program"),
    (b"\xcf\xfa\xed\xfe", "a program"),
    (b"\xca\xfe\xba\xbe", "a program"),
    (b"\xd0\xcf\x11\xe0", "an old Office file"),
)
_MEDIA: Final = ("image", "icon", "recording", "video")
"""Last words of the kinds of pictures and recordings."""
_ZIP_KINDS: Final = {
    ".xlsx": "an Excel file",
    ".pptx": "a PowerPoint file",
    ".odt": "an OpenDocument text",
    ".ods": "an OpenDocument table",
    ".epub": "an EPUB book",
    ".jar": "a Java program",
}


def is_svg(head: bytes) -> bool:
    """Return True for the source of an SVG drawing. head: up to 1 kB of the file."""
    start = head[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    declared = start.startswith((b"<?xml", b"<!doctype svg"))
    return start.startswith(b"<svg") or (declared and b"<svg" in start)


def unreadable_medium(name: str, head: bytes) -> str:
    """Return the kind of a picture, recording or video that cannot be read. Empty for other files."""
    kind = binary_kind(name, head)
    if kind.rpartition(" ")[2] in _MEDIA:
        return kind
    return ""


def binary_kind(name: str, head: bytes) -> str:
    """Return the kind of a binary file, with its article. head: the first bytes."""
    if head[:4] == b"RIFF":
        return {b"WEBP": "a WebP image", b"WAVE": "a WAV recording"}.get(head[8:12], "a video")
    if head[4:8] == b"ftyp":
        if head[8:11] in (b"hei", b"hev", b"avi", b"mif"):
            return "a HEIC or AVIF image"
        return "a video"
    if head.startswith(b"PK"):
        return _ZIP_KINDS.get(PurePath(name).suffix.lower(), "a zip archive")
    return next((kind for magic, kind in _MAGIC if head.startswith(magic)), "a binary file")
