#!/usr/bin/env python3
"""Sends hostile and unusual media through every protocol and the command line, to tiny models.

    scripts/tools/check_hostile_media.py [--cases WORD ...]

Each hostile case must be refused with status 4xx and a sentence, or with exit code 2. Each unusual one must be
answered. After each case, the same engine process must answer a text. The last lines give the peak memory of
server and engine, and the number of faults. Exit code 1 if there are any.
"""

import argparse
import base64
import http.client
import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

import numpy as np  # noqa: E402
import PIL.Image  # noqa: E402
import psutil  # noqa: E402
import soundfile  # noqa: E402

from scripts.bench.server import servers  # noqa: E402
from tests.support.media import HOSTILE, encoded, png, wav  # noqa: E402
from tests.support.tiny_media import write_media_model  # noqa: E402

_PATIENCE_S: Final = 300.0
_TEXTS: Final = ("text", "empty", "html", "one byte", "svg", "svg with a mark")
"""Files that -f sends as text."""
Body = dict[str, Any]


class Case(NamedTuple):
    """A file or a URL, and whether it must be answered."""

    name: str
    kind: str
    """`image`, `audio`, or `url`."""
    data: bytes | str
    good: bool


class Outcome(NamedTuple):
    """What a protocol did with a case."""

    status: int
    sentence: str


def main() -> int:
    """Run every case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=[], help="only those that contain a word")
    words = parser.parse_args().cases
    cases = [case for case in _cases() if not words or any(word in case.name for word in words)]
    faults = 0
    with tempfile.TemporaryDirectory(prefix="check-media-") as name:
        folder = Path(name)
        for family, kinds in (("smolvlm", ("image", "url")), ("ultravox", ("audio",))):
            model = write_media_model(folder / family, family).model
            mine = [case for case in cases if case.kind in kinds]
            with _serving(model, folder) as server:
                for case in mine:
                    faults += server.check(case)
                if family == "smolvlm" and not words:
                    faults += server.check_many()
                print(f"{family}: peak memory {server.peak_bytes() / 1e6:.0f} MB")
            for case in mine:
                if case.kind != "url":
                    faults += _check_command(model, case, folder)
    print(f"{len(cases)} cases, {faults} faults")
    return min(faults, 1)


class _Server:
    """A running server, with the processes behind it."""

    def __init__(self, served: servers.Served) -> None:
        self._port = served.port
        self._process = psutil.Process(served.pid)
        self._text("hello")
        self._engine = self._engine_pid()

    def check(self, case: Case) -> int:
        """Send a case through every protocol. Return the number of faults."""
        outcomes = {name: self._send(path, body) for name, path, body in _requests(case)}
        faults = [
            f"{name}: {outcome.status} {outcome.sentence}"
            for name, outcome in outcomes.items()
            if not _is_right(case, outcome)
        ]
        faults += self._health()
        statuses = " ".join(f"{name} {outcome.status}" for name, outcome in outcomes.items())
        sentence = next(iter(outcomes.values())).sentence
        print(
            f"{'FAULT' if faults else 'ok':5} {case.name}: {statuses} | {sentence[:110]}",
            flush=True,
        )
        for fault in faults:
            print(f"      {fault}")
        return len(faults)

    def check_many(self) -> int:
        """Send 50 pictures, and 32, in one message of each protocol."""
        faults = 0
        for count, good in ((50, False), (32, True)):
            for name, path, body in _requests(Case("", "image", png(), good), count):
                outcome = self._send(path, body)
                # The context of the tiny model has no room for 32 pictures.
                right = outcome.status == 400 and "Traceback" not in outcome.sentence
                faults += not right
                print(f"{count} pictures, {name}: {outcome.status} | {outcome.sentence[:110]}")
        return faults + len(self._health())

    def peak_bytes(self) -> int:
        """Peak resident memory of the server and its engine."""
        pids = [self._process.pid, self._engine]
        texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
        return sum(int(re.findall(r"VmHWM:\s+(\d+)", text)[0]) * 1024 for text in texts)

    def _health(self) -> list[str]:
        outcome = self._text("hello")
        if outcome.status != 200:
            return [f"a text is not answered: {outcome.status} {outcome.sentence}"]
        engine = self._engine_pid()
        if engine != self._engine:
            self._engine = engine
            return ["the engine was restarted"]
        return []

    def _text(self, text: str) -> Outcome:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        return self._send("/v1/chat/completions", body)

    def _engine_pid(self) -> int:
        children = self._process.children()
        return max(
            (child.pid for child in children if "core" in " ".join(child.cmdline())), default=0
        )

    def _send(self, path: str, body: Body) -> Outcome:
        wire = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PATIENCE_S)
        try:
            wire.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = wire.getresponse()
            reply = response.read()
        finally:
            wire.close()
        return Outcome(response.status, _sentence(json.loads(reply)))


def _sentence(reply: Any) -> str:  # noqa: ANN401 - any JSON
    error = reply.get("error")
    if isinstance(error, dict):
        return str(error["message"])
    return str(error or "answered")


def _is_right(case: Case, outcome: Outcome) -> bool:
    if case.good:
        return outcome.status == 200
    return outcome.status in (400, 413) and len(outcome.sentence) > 10


@contextmanager
def _serving(model: Path, folder: Path) -> Iterator[_Server]:
    options = ["--ctx", "2048", "--threads", "2", "--allow-fetch"]
    with servers.localchat("localchat", ROOT, model, folder, options) as served:
        servers.wait_ready(served)
        yield _Server(served)


def _requests(case: Case, count: int = 1) -> Iterator[tuple[str, str, Body]]:
    """Return the requests of a case: name, path and body."""
    data = case.data
    if isinstance(data, str):
        url = data
        raw = None
    else:
        raw = base64.b64encode(data).decode()
        url = f"data:image/png;base64,{raw}"
    question = {"type": "text", "text": "What is this?"}
    limits = {"max_tokens": 2, "temperature": 0}
    part: Body = {"type": "image_url", "image_url": {"url": url}}
    if case.kind == "audio":
        part = {"type": "input_audio", "input_audio": {"data": raw, "format": "wav"}}
    message = {"role": "user", "content": [part] * count + [question]}
    yield "chat", "/v1/chat/completions", {"messages": [message], **limits}
    if case.kind != "audio":
        item: Body = {"type": "input_image", "image_url": url}
        content = [item] * count + [{"type": "input_text", "text": "What is this?"}]
        responses = {"input": [{"role": "user", "content": content}], "max_output_tokens": 16}
        yield "responses", "/v1/responses", responses
        source: Body = {"type": "url", "url": url}
        if raw is not None:
            source = {"type": "base64", "media_type": "image/png", "data": raw}
        block = {"type": "image", "source": source}
        message = {"role": "user", "content": [block] * count + [question]}
        yield "messages", "/v1/messages", {"messages": [message], "max_tokens": 2}
    options = {"stream": False, "options": {"num_predict": 2}}
    images = [raw or url] * count
    message = {"role": "user", "content": "What is this?", "images": images}
    yield "ollama chat", "/api/chat", {"model": "", "messages": [message], **options}
    generate = {"model": "", "prompt": "What is this?", "images": images, **options}
    yield "ollama generate", "/api/generate", generate


def _check_command(model: Path, case: Case, folder: Path) -> int:
    """Give a file to the command line. Return the number of faults."""
    assert isinstance(case.data, bytes)
    file = folder / "it.png"
    file.write_bytes(case.data)
    environ = {
        **os.environ,
        "LOCALCHAT_DATA_DIR": str(folder / "data"),
        "PYTHONWARNINGS": "default",
    }
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    command = [sys.executable, "-m", "localchat", "--model", str(model), "--ctx", "2048"]
    command += ["--max-tokens", "2", "-f", str(file), "What is this?"]
    began_s = time.monotonic()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_PATIENCE_S)
    right = done.returncode == 2 and not done.stdout
    if case.good or case.name in _TEXTS:
        right = done.returncode == 0
    lines = done.stderr.strip().splitlines() or [""]
    right = right and "Traceback" not in done.stderr and "Warning" not in done.stderr
    print(
        f"{'ok' if right else 'FAULT':5} command line, {case.name}: exit {done.returncode}, "
        f"{time.monotonic() - began_s:.1f} s | {lines[0][:110]}",
        flush=True,
    )
    if not right:
        print(done.stderr[-600:])
    return int(not right)


# ---------------------------------------------------------------------------- cases


def _cases() -> Iterator[Case]:
    for name, (data, _) in HOSTILE.items():
        kind = "audio" if re.search("wav|flac|aiff|m4a", name) else "image"
        yield Case(name, kind, data, good=False)
    tables: tuple[tuple[str, bool, Mapping[str, bytes | str]], ...] = (
        ("image", False, _bad_pictures()),
        ("url", False, _bad_urls_of_data()),
        ("url", False, {url[:60]: url for url in _PRIVATE}),
        ("image", True, _odd_pictures()),
        ("url", True, _odd_urls_of_data()),
        ("audio", False, _bad_recordings()),
        ("audio", True, _odd_recordings()),
    )
    for kind, good, files in tables:
        for name, content in files.items():
            yield Case(name, kind, content, good)


_PRIVATE: Final = (
    *("http://127.0.0.1/a.png", "http://127.1/a.png", "http://2130706433/", "http://0x7f.1/"),
    *("http://0177.0.0.1/", "http://0.0.0.0/", "http://localhost/", "http://localhost./"),
    *("http://[::1]/", "http://[::]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/"),
    *("http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "http://[fe80::1%25lo]/"),
    *("http://10.0.0.1/", "http://172.16.0.1/", "http://192.168.0.1/", "http://100.64.0.1/"),
    *("http://169.254.169.254/latest/meta-data", "https://user:word@127.0.0.1/", "http:///a.png"),
    *("file:///etc/passwd", "FILE:/etc/passwd", "ftp://example.org/a.png", "/etc/passwd"),
    *("gopher://127.0.0.1/", "javascript:alert(1)", "http://", "http://[", "x" * 5000),
)


def _chunk(kind: bytes, body: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + body))
    return struct.pack(">I", len(body)) + kind + body + checksum


def _with_chunks(*chunks: bytes) -> bytes:
    data = png(60, 40)
    return data[:33] + b"".join(chunks) + data[33:]


def _noise(width: int = 300, height: int = 200) -> PIL.Image.Image:
    return PIL.Image.effect_noise((width, height), 60).convert("RGB")


def _bad_pictures() -> dict[str, bytes]:
    jpeg = encoded(_noise(), "JPEG")
    return {
        "200,000 chunks": _with_chunks(_chunk(b"prVt", b"") * 200_000),
        "profile of 40 MB": _with_chunks(
            _chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(40_000_000)))
        ),
        "200 texts of 900 kB": _with_chunks(
            *[_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(900_000)))] * 200
        ),
        "half a jpeg": jpeg[: len(jpeg) // 2],
        "bmp of 60,000 x 60,000": b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0),
        "bmp without rows": b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 7000, 7000, 1, 8, 1, 0, 0, 0, 256, 0)
        + bytes(1026),
        "png without width": png()[:16] + bytes(4) + png()[20:],
        "svg with a mark": b"\xef\xbb\xbf<svg></svg>",
        "html": b"<!doctype html><html></html>",
        "one byte": b"\x89",
        "zeros": bytes(1000),
        "33 MB": png() + bytes(33_000_000),
        "200 x 1": png(200, 1),
    }


def _bad_urls_of_data() -> dict[str, str]:
    raw = base64.b64encode(png()).decode()
    nested = base64.b64encode(f"data:image/png;base64,{raw}".encode()).decode()
    sound = base64.b64encode(wav(0.1)).decode()
    return {
        "data URL of signs": "data:image/png;base64,####",
        "data URL of half a group": f"data:image/png;base64,{raw[:41]}",
        "empty data URL": "data:image/png;base64,",
        "data URL without comma": "data:image/png;base64",
        "data URL of a sound": f"data:image/png;base64,{sound}",
        "nested data URL": f"data:image/png;base64,{nested}",
        "not ASCII": "data:image/png;base64,äöü" + raw,
    }


def _odd_pictures() -> dict[str, bytes]:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    palette = PIL.Image.new("P", (40, 40), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    frames = [_noise(40, 40) for _ in range(30)]
    animated: Body = {"save_all": True, "append_images": frames[1:]}
    wide_row = b"\0" + struct.pack(">3H", 65535, 0, 0) * 40
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 40, 40, 16, 2, 0, 0, 0))
    jpeg = encoded(_noise(), "JPEG")
    return {
        "cmyk jpeg": encoded(PIL.Image.new("CMYK", (40, 40)), "JPEG"),
        "progressive jpeg": encoded(_noise(), "JPEG", progressive=True),
        "jpeg with 29 MB of segments": jpeg[:2]
        + (b"\xff\xe5\xff\xff" + bytes(65_533)) * 450
        + jpeg[2:],
        "turned jpeg": encoded(_noise(), "JPEG", exif=exif),
        "jpeg with damaged exif": jpeg[:2]
        + b"\xff\xe1\x01\x98Exif\0\0II*\0\x08\0\0\0"
        + b"\xff" * 394
        + jpeg[2:],
        "16-bit gray png": encoded(PIL.Image.new("I;16", (40, 40), 0x80FF)),
        "16-bit png": png()[:8]
        + header
        + _chunk(b"IDAT", zlib.compress(wide_row * 40))
        + _chunk(b"IEND", b""),
        "palette with alpha": encoded(palette, transparency=bytes([255, 128])),
        "gray with alpha": encoded(PIL.Image.new("LA", (40, 40), (9, 9))),
        "1-bit png": encoded(PIL.Image.new("1", (40, 40))),
        "animated gif": encoded(frames[0].convert("P"), "GIF", **animated),
        "animated png": encoded(frames[0], "PNG", **animated),
        "animated webp": encoded(frames[0], "WEBP", **animated),
        "tiff of 200 pages": encoded(
            PIL.Image.new("L", (20, 20)),
            "TIFF",
            save_all=True,
            append_images=[PIL.Image.new("L", (20, 20))] * 200,
        ),
        "fax tiff": encoded(PIL.Image.new("1", (70, 70)), "TIFF", compression="group4"),
        "49 million pixels": encoded(PIL.Image.new("RGBA", (7000, 7000))),
        "49 million gray pixels of 16 bits": encoded(PIL.Image.new("I;16", (7000, 7000))),
        "20 MB private chunk": _with_chunks(_chunk(b"prVt", bytes(20_000_000))),
        "text behind the picture": png() + b"<script>" * 1000,
        "1 x 1": png(1, 1),
    }


def _odd_urls_of_data() -> dict[str, str]:
    raw = base64.b64encode(png(40, 40)).decode()
    return {
        "data URL of text/html": f"data:text/html;base64,{raw}",
        "data URL of audio/wav": f"data:audio/wav;base64,{raw}",
        "data URL without a type": f"data:;base64,{raw}",
        "data URL in capitals": f"DATA:IMAGE/PNG;BASE64,{raw}",
        "data URL with a parameter": f"data:image/png;charset=utf-8;base64,{raw}",
        "data URL in percents": f"data:image/png,{quote(png(40, 40))}",
        "data URL with lines": f"data:image/png;base64,{raw[:20]}\r\n {raw[20:]}\n",
        "URL-safe data URL": f"data:image/png;base64,{raw.replace('+', '-').replace('/', '_')}",
        "data URL without padding": f"data:image/png;base64,{raw.rstrip('=')}",
    }


def _sound(frames: int, rate: int = 16_000, format_: str = "WAV", **options: Any) -> bytes:  # noqa: ANN401
    file = io.BytesIO()
    times = np.arange(frames) / rate
    soundfile.write(file, 0.5 * np.sin(2700 * times), rate, format=format_, **options)
    return file.getvalue()


def _endless() -> bytes:
    data = bytearray(_sound(16_000))
    data[40:44] = b"\xff\xff\xff\x7f"
    return bytes(data)


def _header(offset: int, field: bytes) -> bytes:
    data = bytearray(_sound(1000))
    data[offset : offset + len(field)] = field
    return bytes(data)


def _bad_recordings() -> dict[str, bytes]:
    return {
        "picture as sound": png(),
        "wav of 0 samples": _sound(0),
        "wav of 1 sample": _sound(1),
        "ogg of 0 samples": _sound(0, format_="OGG"),
        "wav of rate 0": _header(24, bytes(4)),
        "wav of rate 1": _header(24, struct.pack("<I", 1)),
        "wav of rate 4 billion": _header(24, b"\xff" * 4),
        "wav of 0 channels": _header(22, bytes(2)),
        "wav of 999 channels": _header(22, struct.pack("<H", 999)),
        "wav of 384 kHz": _sound(1000, 384_000),
        "flac of an hour": _sound(3600 * 8000, 8000, "FLAC"),
        "au": _sound(100, format_="AU"),
        "tags without mp3": b"ID3\4\0\0\0\0\0\x0a" + bytes(10),
        "theora": b"OggS\0\2" + bytes(20) + b"\1\x2a\x80theora" + bytes(30),
    }


def _odd_recordings() -> dict[str, bytes]:
    samples: dict[str, Callable[[], bytes]] = {
        "wav of 44,101 Hz": lambda: _sound(44_101, 44_101),
        "wav of 191,999 Hz": lambda: _sound(191_999, 191_999),
        "wav of 1,000 Hz": lambda: _sound(1000, 1000),
        "wav that claims 2 GB": _endless,
        "wav in doubles": lambda: _sound(16_000, subtype="DOUBLE"),
        "wav in µ-law": lambda: _sound(8000, 8000, subtype="ULAW"),
        "wav in adpcm": lambda: _sound(8000, 8000, subtype="IMA_ADPCM"),
        "mp3 of 8 kHz": lambda: _sound(16_000, 8000, "MP3"),
        "mp3 of 11,025 Hz": lambda: _sound(22_050, 11_025, "MP3"),
        "flac of 96 kHz and 24 bits": lambda: _sound(96_000, 96_000, "FLAC", subtype="PCM_24"),
        "opus": lambda: _sound(48_000, 48_000, "OGG", subtype="OPUS"),
    }
    return {name: make() for name, make in samples.items()}


if __name__ == "__main__":
    raise SystemExit(main())
