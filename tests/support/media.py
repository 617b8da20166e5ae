"""Small pictures and recordings, and hostile ones."""

import io
import struct
import zlib

import numpy as np
import PIL.Image
import soundfile


def png(width: int = 6, height: int = 4, color: tuple[int, int, int] = (200, 30, 60)) -> bytes:
    """Return a PNG of one color."""
    return encoded(PIL.Image.new("RGB", (width, height), color))


def encoded(picture: PIL.Image.Image, format_: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, format_, **options)
    return file.getvalue()


def wav(seconds: float = 0.5, rate: int = 16_000, format_: str = "WAV", channels: int = 1) -> bytes:
    """Return a tone of 440 Hz."""
    times = np.arange(int(seconds * rate)) / rate
    samples = np.repeat(0.5 * np.sin(2 * np.pi * 440 * times)[:, None], channels, axis=1)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format_)
    return file.getvalue()


def png_header(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG that claims a size. data: its compressed rows."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, body in chunks:
        parts.append(struct.pack(">I", len(body)) + kind + body)
        parts.append(struct.pack(">I", zlib.crc32(kind + body)))
    return b"".join(parts)


def _with_chunk(kind: bytes, body: bytes, count: int = 1) -> bytes:
    """Return a PNG with more chunks after its header."""
    checksum = struct.pack(">I", zlib.crc32(kind + body))
    chunk = struct.pack(">I", len(body)) + kind + body + checksum
    data = png()
    return data[:33] + chunk * count + data[33:]


def _with_marker(segment: bytes, count: int) -> bytes:
    """Return a JPEG with more segments at its start."""
    data = encoded(PIL.Image.new("L", (16, 16)), "JPEG")
    return data[:2] + segment * count + data[2:]


def _many_scans(scans: int) -> bytes:
    """Return the start of a progressive JPEG of 49 million pixels."""
    data = encoded(PIL.Image.new("L", (16, 16)), "JPEG", progressive=True)
    size = data.index(b"\xff\xc2") + 5
    return data[:size] + struct.pack(">HH", 7000, 7000) + data[size + 4 :] + b"\xff\xda" * scans


def _tiff_tiles(side: int, count: int) -> bytes:
    """Return a TIFF of tiles that all have the same bytes."""
    tags = [(256, side), (257, side), (258, 8), (259, 1), (262, 1), (277, 1), (322, 16), (323, 16)]
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags]
    offset = 8 + 2 + 12 * (len(tags) + 1) + 4
    entries.append(struct.pack("<HHII", 324, 4, count, offset))
    head = b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(entries) + bytes(4)
    return head + struct.pack("<I", 8) * count


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"just some text", "is a binary file"),
    "truncated png": (png(300, 300)[:-40], "is damaged or incomplete"),
    "cut in the header": (png()[:20], "is damaged or incomplete"),
    "1 x 100,000": (encoded(PIL.Image.new("1", (1, 100_000))), "1 x 100000 pixels"),
    "bomb of 225 million pixels": (png_header(15_000, 15_000), "million pixels|too many pixels"),
    "bomb of 4 billion pixels": (png_header(65_000, 65_000), "too many pixels"),
    "bomb of 64 million pixels": (
        encoded(PIL.Image.new("1", (8_000, 8_000))),
        "8000 x 8000 pixels",
    ),
    "svg": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "is an SVG drawing"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(40), "is a HEIC or AVIF image"),
    "m4a": (b"\0\0\0\x18ftypM4A " + bytes(40), "is an M4A recording"),
    "video": (b"\x1aE\xdf\xa3" + bytes(40), "is a video"),
    "pdf as png": (b"%PDF-1.7" + bytes(40), "is a PDF file"),
    "flac without frames": (b"fLaC" + bytes(40), "is damaged or incomplete"),
    "hevc": (b"\0\0\0\x18ftyphevc" + bytes(40), "is a HEIC or AVIF image"),
    "avif": (b"\0\0\0\x1cftypavif" + bytes(40), "is a HEIC or AVIF image"),
    "jpeg xl": (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(40), "is a JPEG XL image"),
    "jpeg 2000": (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40), "is a JPEG 2000 image"),
    "icon": (encoded(PIL.Image.new("RGBA", (16, 16)), "ICO"), "is an icon"),
    "metadata of 40 MB": (
        _with_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(40_000_000), 1)),
        "is damaged or incomplete",
    ),
    "empty chunks": (_with_chunk(b"IDAT", b"", 40_000), "too many parts"),
    "color profiles": (_with_chunk(b"iCCP", b"a\0\0" + bytes(9), 5), "too many parts"),
    "padding in a jpeg": (_with_marker(b"\xff", 60_000), "too many parts"),
    "exif segments": (_with_marker(b"\xff\xe1\0\x0aExif\0\0II", 5), "too many parts"),
    "scans over 49 million pixels": (_many_scans(50), "too many parts"),
    "200,001 tiles": (_tiff_tiles(7056, 200_001), "too many parts"),
    "tiles of the same bytes": (_tiff_tiles(1600, 10_000), "too many parts"),
    "animation larger than its frames": (
        b"GIF89a\xff\xff\xff\xff\x80\0\0" + bytes(6) + b",\0\0\0\0\1\0\1\0\0\2\2D\1\0;",
        "too many pixels",
    ),
    "truncated webp": (encoded(PIL.Image.new("RGB", (99, 99)), "WEBP")[:-20], "is damaged"),
    "aiff": (b"FORM\0\0\0\x20AIFF" + bytes(40), "is an AIFF recording"),
    "wav of 1 hertz": (wav(1000, 1), "channels of 1 Hz"),
    "wav of 16 channels": (wav(0.1, channels=16), "has 16 channels"),
    "wav without samples": (b"RIFF\x24\0\0\0WAVEfmt ", "is damaged or incomplete"),
}
"""Files that must be refused, and a pattern of the sentence."""
