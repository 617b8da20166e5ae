"""Decoding of pictures by Pillow and of recordings by soundfile, within the limits of `limits.py`."""

import io
import math
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from localchat.errors import UsageError
from localchat.media.binary_kind import binary_kind, is_svg
from localchat.media.format import HEAD_BYTES, MediaFormat, MediaKind, media_format
from localchat.media.limits import (
    MAX_AUDIO_RATE,
    MAX_AUDIO_S,
    MAX_CHANNELS,
    MAX_EXIF_BYTES,
    MAX_FILE_BYTES,
    MAX_PICTURE_READS,
    MAX_PIXELS,
    MAX_PROFILES,
    MAX_READ_RATIO,
    MAX_SAMPLES,
    MAX_SCANNED_PIXELS,
    MAX_SIDE_RATIO,
    MAX_TAG_VALUES,
    MIN_AUDIO_RATE,
    MIN_AUDIO_S,
)
from localchat.units import size

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image
    import soundfile
    from numpy.typing import NDArray

_PICTURES: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_PLUGINS: Final = ("Png", "Jpeg", "WebP", "Gif", "Bmp", "Tiff")
"""Pillow's modules for them. If one is missing, Pillow imports all of its forty formats."""
_ASCII: Final = 2
"""Type of the tags of a TIFF file that are texts."""
_LAST_BASELINE_TAG: Final = 339
"""Highest number of a TIFF tag that Pillow reads to decode pixels."""
_RECORDINGS: Final = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3", "MPEG")
_WAV_RATE: Final = 16_000
_BLOCK_FRAMES: Final = 1 << 16
_BLOCK_OUTPUTS: Final = 1 << 14
"""Samples that are resampled at once. Each needs a copy of its window, of up to 1.5 kB."""
_BLOCK_PHASES: Final = 256
_FILTER_ZEROS: Final = 16
"""Zero crossings of the resampling filter on each side."""
_FILTER_BETA: Final = 8.6
"""Shape of the Kaiser window: 85 dB of attenuation."""
_PASSBAND: Final = 0.94
"""Part of the lower rate's bandwidth that resampling preserves."""


class Image(NamedTuple):
    """A decoded picture."""

    width: int
    height: int
    rgb: bytes
    """Rows from the top, 3 bytes a pixel, without padding."""


class MediaInfo(NamedTuple):
    """Facts from the header of a picture or a recording."""

    format: MediaFormat
    width: int = 0
    """Pixels, as shown. 0 for a recording."""
    height: int = 0
    seconds: float = 0.0
    """Length of a recording. 0 for a picture."""

    @property
    def label(self) -> str:
        """`640x480`, or `1:05` for a recording."""
        if self.format.kind == "image":
            return f"{self.width}x{self.height}"
        minutes, seconds = divmod(round(self.seconds), 60)
        return f"{minutes}:{seconds:02}"


def load_decoders(kinds: Collection[str]) -> None:
    """Import what the first attachment of these kinds would import."""
    if "image" in kinds:
        for plugin in _PLUGINS:
            import_module(f"PIL.{plugin}ImagePlugin")
    if "audio" in kinds:
        import_module("soundfile")


def media_info(data: bytes, name: str = "") -> MediaInfo:
    """Check the header of a picture or a recording. Raises UsageError, which names the file.

    The pixels are not decoded, so a file that is damaged further on passes.
    """
    format_ = check_format(data, name)
    if format_.kind == "audio":
        with _open_recording(data, name) as recording:
            return MediaInfo(format_, seconds=recording.frames / recording.samplerate)
    with _open_picture(data, name) as picture:
        # Orientations 5 to 8 of EXIF turn the picture by 90 degrees.
        if picture.getexif().get(0x0112, 1) in (5, 6, 7, 8):
            return MediaInfo(format_, picture.height, picture.width)
        return MediaInfo(format_, picture.width, picture.height)


def check_format(data: bytes, name: str = "", kind: MediaKind | None = None) -> MediaFormat:
    """Return the format of a file by its content. Raises UsageError if it is not supported or too large."""
    shown = name or "the file"
    if not data:
        raise UsageError(f"{shown} is empty")
    format_ = media_format(data[:HEAD_BYTES])
    if format_ is None or (kind is not None and format_.kind != kind):
        raise UsageError(f"{shown} is {_kind_name(data, name)}", hint=_hint(data, kind))
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(
            f"{shown} has {size(len(data))}",
            hint=f"pictures and recordings may have up to {size(MAX_FILE_BYTES)}",
        )
    return format_


def decode_image(data: bytes, name: str = "") -> Image:
    """Decode a picture to 8-bit RGB. Raises UsageError.

    The first frame of an animation is used. The EXIF orientation is applied, and transparent pixels become
    white.
    """
    check_format(data, name, "image")
    with _open_picture(data, name) as opened:
        from PIL import ImageOps

        opened.load()
        ImageOps.exif_transpose(opened, in_place=True)
        picture = _rgb(opened, name)
        return Image(picture.width, picture.height, picture.tobytes())


def decode_audio(data: bytes, rate: int, name: str = "") -> "NDArray[np.float32]":
    """Decode a recording to mono samples from -1 to 1 at `rate` per second. Raises UsageError."""
    check_format(data, name, "audio")
    import numpy as np

    with _open_recording(data, name) as recording:
        resampler = _Resampler(recording.samplerate, rate)
        blocks = []
        frames = 0
        while len(block := recording.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
            # The header of a stream may understate its length.
            frames += len(block)
            _check_length(recording, frames, name)
            blocks.append(resampler.resample(block.mean(axis=1)))
        blocks.append(resampler.finish())
        samples = np.concatenate(blocks)
    if len(samples) < MIN_AUDIO_S * rate:
        raise UsageError(
            f"{name or 'the recording'} lasts less than {MIN_AUDIO_S} seconds",
            hint="send a longer recording",
        )
    # A float file may contain anything.
    return np.clip(np.nan_to_num(samples, copy=False), -1.0, 1.0, out=samples)


def as_png(data: bytes, name: str = "") -> bytes:
    """Return a picture as PNG, for programs that read few formats. Raises UsageError."""
    import PIL.Image

    image = decode_image(data, name)
    file = io.BytesIO()
    PIL.Image.frombytes("RGB", (image.width, image.height), image.rgb).save(file, "PNG")
    return file.getvalue()


def as_wav(data: bytes, name: str = "") -> bytes:
    """Return a recording as WAV of 16 kHz, for programs that read few formats. Raises UsageError."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, decode_audio(data, _WAV_RATE, name), _WAV_RATE, format="WAV")
    return file.getvalue()


def _kind_name(data: bytes, name: str) -> str:
    if is_svg(data):
        return "an SVG drawing"
    if data[4:8] == b"ftyp" and data[8:11] == b"M4A":
        return "an M4A recording"
    return binary_kind(name, data[:HEAD_BYTES])


def _hint(data: bytes, kind: MediaKind | None) -> str:
    pictures = "pictures can be PNG, JPEG, WebP, GIF, BMP or TIFF"
    recordings = "recordings can be WAV, MP3, FLAC or Ogg"
    if kind == "image":
        return pictures
    if kind == "audio":
        return recordings
    return f"{pictures}; {recordings}"


class _PictureFile(io.BytesIO):
    """File of a picture that limits what is read from it.

    Pillow reads the parts of a file one by one in Python. It would take minutes for a file of many tiny
    parts, and for one whose parts overlap.
    """

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self._name = name
        self._reads_left = MAX_PICTURE_READS
        self._bytes_left = MAX_READ_RATIO * len(data)

    def read(self, count: int | None = -1, /) -> bytes:
        part = super().read(count)
        self._reads_left -= 1
        self._bytes_left -= len(part)
        if min(self._reads_left, self._bytes_left) < 0:
            raise _too_many_parts(self._name)
        return part


def _too_many_parts(name: str) -> UsageError:
    return UsageError(f"{name} consists of too many parts", hint="save it again as PNG")


def _check_parts(data: bytes, name: str) -> None:
    """Reject files with parts that each cost much more than their bytes. Raises UsageError."""
    # Pillow joins the EXIF data of all segments in quadratic time, and inflates each color profile to 1 MB.
    if max(data.count(b"Exif\0\0"), data.count(b"iCCP")) > MAX_PROFILES:
        raise _too_many_parts(name)
    # Pillow makes Python objects of all values of these tags: offsets of strips and tiles, colors.
    for tag in _tiff_tags(data):
        if tag.number <= _LAST_BASELINE_TAG and tag.type != _ASCII and tag.values > MAX_TAG_VALUES:
            raise _too_many_parts(name)


class _TiffTag(NamedTuple):
    number: int
    type: int
    values: int


def _tiff_tags(data: bytes) -> Iterator[_TiffTag]:
    """Yield the tags of the first picture of a TIFF file. Nothing for other formats."""
    if data[:4] not in (b"II*\0", b"MM\0*"):
        return
    order: Literal["little", "big"] = "little"
    if data.startswith(b"MM"):
        order = "big"
    start = int.from_bytes(data[4:8], order)
    tags = int.from_bytes(data[start : start + 2], order)
    for offset in range(start + 2, start + 2 + 12 * tags, 12):
        number = int.from_bytes(data[offset : offset + 2], order)
        type_ = int.from_bytes(data[offset + 2 : offset + 4], order)
        yield _TiffTag(number, type_, int.from_bytes(data[offset + 4 : offset + 8], order))


def _check_scans(data: bytes, pixels: int, name: str) -> None:
    """Reject JPEG pictures with many scans, each of which passes over all pixels. Raises UsageError."""
    # In a scan, 0xFF is always followed by 0 or by the number of a restart marker.
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") * pixels > MAX_SCANNED_PIXELS:
        raise _too_many_parts(name)


@contextmanager
def _open_picture(data: bytes, name: str) -> "Iterator[PIL.Image.Image]":
    """Open a picture and check its size. Errors of Pillow become UsageErrors."""
    import PIL.Image

    load_decoders(("image",))
    # Damage that does not matter, such as in EXIF data, would be printed on the screen.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    # Pillow checks for bombs while it opens a file, and warns below twice its limit.
    warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
    shown = name or "the picture"
    try:
        _check_parts(data, shown)
        with PIL.Image.open(_PictureFile(data, shown), formats=_PICTURES) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise UsageError(
                    f"{shown} has {width} x {height} pixels",
                    hint=f"up to {MAX_PIXELS // 1_000_000} million pixels can be read; make it smaller",
                )
            if max(width, height) > MAX_SIDE_RATIO * min(width, height):
                raise UsageError(
                    f"{shown} has {width} x {height} pixels",
                    hint=f"one side may be {MAX_SIDE_RATIO} times as long as the other at most; crop it",
                )
            _check_scans(data, width * height, shown)
            # Pillow copies the data of every tag, and a tag may claim all of the EXIF data.
            for key in ("exif", "Raw profile type exif"):
                if len(picture.info.get(key, "")) > MAX_EXIF_BYTES:
                    del picture.info[key]
            yield picture
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as problem:
        raise UsageError(
            f"{shown} has too many pixels",
            hint=f"up to {MAX_PIXELS // 1_000_000} million pixels can be read; make it smaller",
        ) from problem
    except UsageError:
        raise
    except Exception as problem:  # a damaged file can raise anything from a decoder
        raise UsageError(
            f"{shown} is damaged or incomplete", hint="save it again as PNG"
        ) from problem


def _rgb(picture: "PIL.Image.Image", name: str) -> "PIL.Image.Image":
    """Convert a decoded picture of any mode to RGB, with transparent pixels on white."""
    import PIL.Image

    if picture.mode.startswith(("I", "F")):
        picture = _eight_bit(picture, name)
    if picture.has_transparency_data:
        if picture.mode != "RGBA":
            picture = picture.convert("RGBA")
        white = PIL.Image.new("RGB", picture.size, "white")
        white.paste(picture, mask=picture.getchannel("A"))
        return white
    if picture.mode == "RGB":
        return picture
    return picture.convert("RGB")


def _eight_bit(picture: "PIL.Image.Image", name: str) -> "PIL.Image.Image":
    """Scale 16-bit gray values to 8 bits."""
    import numpy as np
    import PIL.Image

    values = np.asarray(picture)
    if picture.mode == "F" or values.min() < 0 or values.max() > 0xFFFF:
        raise UsageError(
            f"{name or 'the picture'} has pixels of 32 bits",
            hint="save it with 8 or 16 bits a pixel",
        )
    return PIL.Image.fromarray((values >> 8).astype(np.uint8))


@contextmanager
def _open_recording(data: bytes, name: str) -> "Iterator[soundfile.SoundFile]":
    """Open a recording and check its length. Errors of soundfile become UsageErrors."""
    import soundfile

    shown = name or "the recording"
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as recording:
            if recording.format not in _RECORDINGS:
                raise UsageError(
                    f"{shown} is a {recording.format} recording", hint=_hint(data, "audio")
                )
            if (
                recording.channels > MAX_CHANNELS
                or not MIN_AUDIO_RATE <= recording.samplerate <= MAX_AUDIO_RATE
            ):
                raise UsageError(
                    f"{shown} has {recording.channels} channels of {recording.samplerate:,} Hz",
                    hint=f"up to {MAX_CHANNELS} channels of {MIN_AUDIO_RATE:,} to {MAX_AUDIO_RATE:,} Hz "
                    "can be read",
                )
            _check_length(recording, recording.frames, name)
            yield recording
    except UsageError:
        raise
    except Exception as problem:  # a damaged file can raise anything from a decoder
        raise UsageError(
            f"{shown} is damaged or incomplete", hint="save it again as WAV"
        ) from problem


def _check_length(recording: "soundfile.SoundFile", frames: int, name: str) -> None:
    shown = name or "the recording"
    if frames > MAX_AUDIO_S * recording.samplerate:
        raise UsageError(
            f"{shown} lasts longer than {MAX_AUDIO_S // 60} minutes", hint="cut it into parts"
        )
    if frames * recording.channels > MAX_SAMPLES:
        raise UsageError(
            f"{shown} has more than {MAX_SAMPLES // 1_000_000} million samples",
            hint="cut it into parts, or save it with fewer channels or at a lower rate",
        )


class _Resampler:
    """Polyphase resampler of a mono stream, by a windowed sinc.

    Output sample n is the filtered input at time n * down / up.
    """

    def __init__(self, source_rate: int, target_rate: int) -> None:
        import numpy as np

        divisor = math.gcd(source_rate, target_rate)
        self._up = target_rate // divisor
        self._down = source_rate // divisor
        cutoff = min(1.0, target_rate / source_rate)
        half = math.ceil(_FILTER_ZEROS / cutoff)
        self._half = half
        # Row p holds the taps of outputs whose time has the fraction p / up.
        self._taps: NDArray[np.float32] = np.empty((self._up, 2 * half), np.float32)
        steps = np.arange(-half + 1, half + 1)[None, :]
        for start in range(0, self._up, _BLOCK_PHASES):
            rows = self._taps[start : start + _BLOCK_PHASES]
            times = steps - np.arange(start, start + len(rows))[:, None] / self._up
            window = np.i0(_FILTER_BETA * np.sqrt(np.clip(1 - (times / half) ** 2, 0, None)))
            taps = np.sinc(times * cutoff * _PASSBAND) * window
            rows[:] = taps / taps.sum(axis=1, keepdims=True)
        # The first window is centered on the first sample.
        self._buffer: NDArray[np.float32] = np.zeros(half - 1, np.float32)
        self._start = 1 - half
        """Index of the buffer's first sample in the stream."""
        self._output = 0
        """Index of the next output sample."""
        self._frames = 0

    def resample(self, samples: "NDArray[np.float32]") -> "NDArray[np.float32]":
        """Return the output samples whose whole window has arrived."""
        import numpy as np

        if self._up == self._down:
            return samples
        self._frames += len(samples)
        self._buffer = np.concatenate((self._buffer, samples))
        return self._take(self._start + len(self._buffer) - self._half)

    def finish(self) -> "NDArray[np.float32]":
        """Return the last output samples."""
        import numpy as np

        if self._up == self._down:
            return np.zeros(0, np.float32)
        self._buffer = np.concatenate((self._buffer, np.zeros(self._half, np.float32)))
        return self._take(self._frames)

    def _take(self, end: int) -> "NDArray[np.float32]":
        """Return the outputs at input times before `end`."""
        import numpy as np

        stop = max(self._output, -(-end * self._up // self._down))
        positions = np.arange(self._output, stop, dtype=np.int64) * self._down
        first = positions // self._up - self._half + 1 - self._start
        if not len(positions):
            return np.zeros(0, np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(self._buffer, 2 * self._half)
        outputs: NDArray[np.float32] = np.empty(len(positions), np.float32)
        for start in range(0, len(positions), _BLOCK_OUTPUTS):
            piece = slice(start, start + _BLOCK_OUTPUTS)
            taps = self._taps[positions[piece] % self._up]
            np.einsum("nk,nk->n", windows[first[piece]], taps, out=outputs[piece])
        self._output = stop
        used = stop * self._down // self._up - self._half + 1 - self._start
        self._buffer = self._buffer[used:]
        self._start += used
        return outputs
