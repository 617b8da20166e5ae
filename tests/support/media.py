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


def _with_chunk(kind: bytes, body: bytes) -> bytes:
    """Return a PNG with one more chunk after its header."""
    checksum = struct.pack(">I", zlib.crc32(kind + body))
    chunk = struct.pack(">I", len(body)) + kind + body + checksum
    data = png()
    return data[:33] + chunk + data[33:]


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
        _with_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(40_000_000))),
        "is damaged or incomplete",
    ),
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
