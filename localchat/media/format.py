"""Formats of pictures and recordings, by their first bytes. File names and declared types are ignored."""

from typing import Final, Literal, NamedTuple

MediaKind = Literal["image", "audio"]

HEAD_BYTES: Final = 64
"""Bytes from the start of a file that show its format."""


class MediaFormat(NamedTuple):
    """A format that can be decoded."""

    kind: MediaKind
    media_type: str
    """MIME type, such as `image/png`."""
    suffix: str
    """Suffix of a file name, with its dot."""


_JPEG: Final = MediaFormat("image", "image/jpeg", ".jpg")
_TIFF: Final = MediaFormat("image", "image/tiff", ".tiff")
_MP3: Final = MediaFormat("audio", "audio/mpeg", ".mp3")
_MAGIC: Final = (
    (b"\x89PNG\r\n\x1a\n", MediaFormat("image", "image/png", ".png")),
    (b"\xff\xd8\xff", _JPEG),
    (b"GIF87a", MediaFormat("image", "image/gif", ".gif")),
    (b"GIF89a", MediaFormat("image", "image/gif", ".gif")),
    (b"II*\0", _TIFF),
    (b"MM\0*", _TIFF),
    # The version follows: a text may start with the same letters.
    (b"ID3\2", _MP3),
    (b"ID3\3", _MP3),
    (b"ID3\4", _MP3),
    (b"OggS\0", MediaFormat("audio", "audio/ogg", ".ogg")),
    (b"fLaC\0", MediaFormat("audio", "audio/flac", ".flac")),
)
_RIFF: Final = {
    b"WEBP": MediaFormat("image", "image/webp", ".webp"),
    b"WAVE": MediaFormat("audio", "audio/wav", ".wav"),
}


def media_format(head: bytes) -> MediaFormat | None:
    """Return the format of a file from its first `HEAD_BYTES` bytes. None if it is not supported."""
    if head[:4] == b"RIFF":
        return _RIFF.get(head[8:12])
    # A text may start with BM too: require the zeros of the reserved fields.
    if head[:2] == b"BM" and head[6:10] == bytes(4):
        return MediaFormat("image", "image/bmp", ".bmp")
    # An MPEG frame of layer III: 11 set bits, then a valid version, layer and bit rate.
    if (
        len(head) > 2
        and head[0] == 0xFF
        and head[1] & 0xE6 == 0xE2
        and head[1] & 0x18 != 0x08
        and head[2] & 0xF0 not in (0x00, 0xF0)
        and head[2] & 0x0C != 0x0C
    ):
        return _MP3
    return next((format_ for magic, format_ in _MAGIC if head.startswith(magic)), None)
