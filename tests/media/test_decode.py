"""Pictures of every mode become RGB, recordings mono samples; hostile files a sentence."""

import re
import struct
import tracemalloc
import warnings

import numpy as np
import PIL.Image
import pytest

from localchat.errors import UsageError
from localchat.media.decode import decode_audio, decode_image, media_info
from localchat.media.format import media_format
from tests.support.media import HOSTILE, encoded, png, wav


def first_pixel(data: bytes) -> tuple[int, ...]:
    return tuple(decode_image(data).rgb[:3])


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_format_is_decoded_and_recognized_by_its_content(format_: str) -> None:
    data = encoded(PIL.Image.new("RGB", (6, 4), (0, 0, 255)), format_)
    image = decode_image(data, "picture.txt")
    assert (image.width, image.height, len(image.rgb)) == (6, 4, 72)
    assert np.abs(np.array(first_pixel(data)) - (0, 0, 255)).max() < 4
    info = media_info(data)
    assert info.format.kind == "image" and info.label == "6x4"


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        pytest.param(PIL.Image.new("RGBA", (2, 2), (0, 0, 0, 0)), (255, 255, 255), id="clear"),
        pytest.param(PIL.Image.new("RGBA", (2, 2), (0, 0, 0, 51)), (204, 204, 204), id="alpha"),
        pytest.param(PIL.Image.new("LA", (2, 2), (0, 0)), (255, 255, 255), id="gray-alpha"),
        pytest.param(PIL.Image.new("I;16", (2, 2), 0x80FF), (128, 128, 128), id="16-bit"),
        pytest.param(PIL.Image.new("1", (2, 2), 1), (255, 255, 255), id="1-bit"),
        pytest.param(PIL.Image.new("RGB", (2, 2), "red").convert("P"), (255, 0, 0), id="palette"),
    ],
)
def test_every_mode_becomes_rgb(picture: PIL.Image.Image, expected: tuple[int, ...]) -> None:
    assert first_pixel(encoded(picture)) == expected


def test_cmyk_is_converted() -> None:
    data = encoded(PIL.Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)
    red, green, blue = first_pixel(data)
    assert red > 250 and green < 5 and blue < 5


def test_a_transparent_palette_color_becomes_white() -> None:
    picture = PIL.Image.new("P", (2, 2), 1)
    picture.putpalette([0, 0, 0, 10, 20, 30])
    assert first_pixel(encoded(picture, transparency=1)) == (255, 255, 255)


def test_the_first_frame_of_an_animation_is_used() -> None:
    frames = [PIL.Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    for format_ in ("GIF", "PNG", "WEBP"):
        data = encoded(frames[0], format_, save_all=True, append_images=frames[1:], lossless=True)
        red, _, blue = first_pixel(data)
        assert red > 250 and blue < 5, format_


def test_exif_orientation_is_applied() -> None:
    picture = PIL.Image.new("RGB", (4, 2), "white")
    picture.putpixel((0, 1), (0, 0, 0))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    data = encoded(picture, "PNG", exif=exif)
    image = decode_image(data)
    assert (image.width, image.height) == (2, 4)
    assert image.rgb[:3] == bytes(3)
    assert media_info(data).label == "2x4"


def test_exif_data_of_many_long_tags_is_ignored() -> None:
    tags = 20_000
    entries = b"".join(struct.pack("<HHII", tag, 7, 200_000, 8) for tag in range(tags))
    exif = b"II*\0" + struct.pack("<IH", 8, tags) + entries
    data = encoded(PIL.Image.new("RGB", (4, 2)), "WEBP", exif=b"Exif\0\0" + exif)
    assert media_info(data).label == "4x2"
    assert decode_image(data).width == 4


def test_a_float_tiff_is_refused() -> None:
    with pytest.raises(UsageError, match="pixels of 32 bits"):
        decode_image(encoded(PIL.Image.new("F", (2, 2), 0.5), "TIFF"))


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_with_little_memory(case: str) -> None:
    data, sentence = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=sentence) as error:
            decode_audio(data, 16_000, "it") if media_kind(data) == "audio" else decode_image(
                data, "it"
            )
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error.value.message.startswith("it ")
    assert peak_bytes < 4_000_000


def media_kind(data: bytes) -> str:
    format_ = media_format(data[:64])
    return format_.kind if format_ else "image"


def test_random_damage_never_raises_anything_else() -> None:
    random = np.random.default_rng(1)
    files = [
        encoded(PIL.Image.effect_noise((40, 40), 50).convert("RGB"), format_)
        for format_ in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
    ]
    files += [wav(0.1, format_=format_) for format_ in ("WAV", "FLAC", "OGG", "MP3")]
    for data in files:
        for _ in range(60):
            damaged = bytearray(data)
            for place in random.integers(0, min(len(data), 400), 4):
                damaged[place] = random.integers(256)
            try:
                if media_kind(data) == "image":
                    decode_image(bytes(damaged))
                else:
                    decode_audio(bytes(damaged), 16_000)
            except UsageError:
                pass


@pytest.mark.parametrize("format_", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_recordings_become_mono_samples_of_the_rate(format_: str, rate: int) -> None:
    samples = decode_audio(wav(1.0, rate, format_, channels=2), 16_000)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 16_000) <= 16_000 * 0.08  # MP3 pads
    middle = samples[4_000:12_000]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert abs(np.argmax(spectrum) * 2 - 440) <= 2
    assert abs(np.sqrt(np.mean(middle**2)) - 0.3536) < 0.02


@pytest.mark.parametrize("rate", [11_025, 44_100, 48_000, 16_000, 96_000])
def test_resampling_preserves_length_and_phase_over_many_blocks(rate: int) -> None:
    seconds = 5.0
    samples = decode_audio(wav(seconds, rate, "FLAC"), 16_000)
    assert len(samples) == -(-int(seconds * rate) * 16_000 // rate)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(samples)) / 16_000)
    assert np.abs(samples - expected)[200:-200].max() < 2e-3


def test_a_tone_above_the_new_bandwidth_does_not_alias() -> None:
    import io

    import soundfile

    file = io.BytesIO()
    soundfile.write(
        file, 0.5 * np.sin(2 * np.pi * 11_000 * np.arange(48_000) / 48_000), 48_000, format="WAV"
    )
    assert np.abs(decode_audio(file.getvalue(), 16_000)[200:-200]).max() < 1e-3


def test_a_recording_may_not_be_too_long() -> None:
    with pytest.raises(UsageError, match="longer than 30 minutes"):
        decode_audio(wav(1801, 1000, "FLAC"), 16_000, "long.flac")


@pytest.mark.parametrize("seconds", [0, 0.0001, 0.099])
def test_a_recording_shorter_than_a_window_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match=r"it lasts less than 0\.1 seconds"):
        decode_audio(wav(seconds), 16_000, "it")
    assert len(decode_audio(wav(0.1, 44_100), 16_000)) == 1600


def test_samples_of_all_channels_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localchat.media.decode.MAX_SAMPLES", 1_000_000)
    assert len(decode_audio(wav(60, channels=1), 16_000)) == 960_000
    with pytest.raises(UsageError, match="more than 1 million samples"):
        decode_audio(wav(60, channels=2), 16_000, "it")


@pytest.mark.parametrize("rate", [44_101, 191_999])
def test_a_rate_without_a_common_divisor_needs_little_memory(rate: int) -> None:
    data = wav(0.5, rate)
    tracemalloc.start()
    try:
        samples = decode_audio(data, 16_000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert abs(len(samples) - 8_000) <= 1
    assert np.abs(samples[2_000:6_000]).max() == pytest.approx(0.5, abs=0.01)
    assert peak_bytes < 100_000_000


def test_damage_in_exif_data_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0" + b"\xff" * 400
    segment = b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif
    data = encoded(PIL.Image.new("RGB", (6, 4)), "JPEG")
    data = data[:2] + segment + data[2:]
    with warnings.catch_warnings(record=True) as caught:
        assert decode_image(data).width == 6
    assert not caught
    assert capsys.readouterr() == ("", "")


def test_a_picture_is_no_recording() -> None:
    with pytest.raises(UsageError, match=re.escape("x is a PNG image")):
        decode_audio(png(), 16_000, "x")
