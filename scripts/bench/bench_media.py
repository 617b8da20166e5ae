#!/usr/bin/env python3
"""Measures the second question about a picture beside a second question about a text of the same length.

    scripts/bench/bench_media.py [--family smolvlm] [--rounds 9] [--restarts 5] [--size small]

A model with random weights and its projector are written first; `small` has 200 million parameters. The
server of this checkout reads a picture and a text, and then gets other questions about both in turn, greedy and
sampled. After each restart it gets one question about each, in changing order. Prints medians of the time to
the first token in ms, of the CPU time of the server and its engine, which a busy machine changes less, and of
the ratios of neighboring questions. The last line is JSON.
"""

import argparse
import base64
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

import numpy as np  # noqa: E402
import PIL.Image  # noqa: E402

from localchat.measure.workload import prose  # noqa: E402 - found by the path above
from scripts.bench.server import servers  # noqa: E402
from scripts.bench.server.client import Body, alone, chat  # noqa: E402
from tests.support.tiny_media import FAMILIES, SMALL, TINY, TinyMedia, write_media_model  # noqa: E402

_SIZES: Final = {"tiny": TINY, "small": SMALL}
_WAYS: Final = {"greedy": 0.0, "sampled": 0.8}
_PICTURE_SIZE: Final = (1600, 1200)
_PAUSE_S: Final = 1.0
_SETTLE_S: Final = 4.0
"""Time in which an idle server writes its KV to the disk."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=[*FAMILIES], default="smolvlm")
    parser.add_argument("--size", choices=[*_SIZES], default="small")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--restarts", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-media-") as folder:
        model = write_media_model(Path(folder), options.family, size=_SIZES[options.size])
        bench = _Bench(model, Path(folder))
        bench.read_and_ask(options.rounds)
        for number in range(options.restarts):
            bench.ask_after_restart(number)
        figures = bench.figures()
    print(json.dumps({"load_average": round(os.getloadavg()[0], 2), **figures}))
    return 0


class _Bench:
    """Questions about a picture and about a text, and the times of their first tokens."""

    def __init__(self, model: TinyMedia, folder: Path) -> None:
        self._model = model.model
        self._folder = folder
        self._picture = _picture()
        self._text = ""
        self._asked = 0
        self._pairs: dict[str, list[dict[str, dict[str, float]]]] = {}

    def read_and_ask(self, rounds: int) -> None:
        """Read the picture and the text, and ask about them in turn."""
        with self._serving() as served:
            port = served.port
            for way in _WAYS:
                began_s = time.perf_counter()
                tokens = alone(port, self._body("picture", way)).prompt_tokens
                first_s = time.perf_counter() - began_s
                if not self._text:
                    print(f"picture: {tokens} tokens, first question {first_s * 1000:.0f} ms")
                    self._text = self._fitting_text(port, tokens)
                alone(port, self._body("text", way))
            for number in range(rounds):
                for way in _WAYS:
                    self._ask_pair(served, way, f"{way}, warm", number)
            time.sleep(_SETTLE_S)

    def ask_after_restart(self, number: int) -> None:
        """Start the server again, and ask about both."""
        for way in _WAYS:
            with self._serving() as served:
                self._ask_pair(served, way, f"{way}, restarted", number)
                time.sleep(_SETTLE_S)

    def figures(self) -> dict[str, float]:
        """Print and return the medians."""
        figures = {}
        for state, pairs in self._pairs.items():
            for measure in ("first token", "CPU"):
                texts = [1000 * pair["text"][measure] for pair in pairs]
                pictures = [1000 * pair["picture"][measure] for pair in pairs]
                ratios = [picture / text for picture, text in zip(pictures, texts, strict=True)]
                row = [statistics.median(values) for values in (texts, pictures, ratios)]
                columns = ("text ms", "picture ms", "ratio")
                for column, value in zip(columns, row, strict=True):
                    figures[f"{state}, {measure}: {column}"] = round(value, 3)
                print(
                    f"{state:20} {measure:12} text {row[0]:7.1f}   picture {row[1]:7.1f}   "
                    f"ratio {row[2]:.2f}"
                )
        return figures

    def _ask_pair(self, served: servers.Served, way: str, state: str, number: int) -> None:
        kinds = ("text", "picture") if number % 2 else ("picture", "text")
        pair = {}
        for kind in kinds:
            self._asked += 1
            before_s = served.all_cpu_s()
            first_s = alone(served.port, self._body(kind, way)).first_s
            pair[kind] = {"first token": first_s, "CPU": served.all_cpu_s() - before_s}
            # The engine repeats the answer's KV, and writes it to the disk.
            time.sleep(_PAUSE_S)
        self._pairs.setdefault(state, []).append(pair)

    def _body(self, kind: str, way: str) -> Body:
        question = f"{self._asked:04} What is odd in it, and where would you look next? "
        body = chat(question, 1, temperature=_WAYS[way])
        content = [{"type": "text", "text": question}]
        if kind == "picture":
            content.insert(0, {"type": "image_url", "image_url": {"url": self._picture}})  # type: ignore[dict-item]
        else:
            content[0]["text"] = f"{self._text}{question}"
        body["messages"][0]["content"] = content
        return body

    def _fitting_text(self, port: int, tokens: int) -> str:
        """Return a text with which a prompt has about as many tokens as with the picture."""
        text = prose(2 * tokens, 1)
        length = tokens
        for _ in range(8):
            self._text = text[:length]
            missing = tokens - alone(port, self._body("text", "sampled")).prompt_tokens
            if abs(missing) <= 2:
                break
            length += missing
        print(f"text: {tokens - missing} tokens")
        return text[:length]

    @contextmanager
    def _serving(self) -> Iterator[servers.Served]:
        options = ["--ctx", "2048", "--threads", "2", "--parallel", "2"]
        name = "localchat"
        with servers.localchat(name, ROOT, self._model, self._folder, options) as served:
            servers.wait_ready(served)
            alone(served.port, chat("warm-up", 4))
            yield served


def _picture() -> str:
    """Return a photo-like picture as a data URL."""
    draw = np.random.default_rng(7)
    coarse = PIL.Image.fromarray(draw.integers(0, 256, (30, 40, 3), dtype=np.uint8))
    picture = np.asarray(coarse.resize(_PICTURE_SIZE, PIL.Image.Resampling.BICUBIC), np.int16)
    noisy = picture + draw.integers(-8, 8, picture.shape)
    file = io.BytesIO()
    PIL.Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


if __name__ == "__main__":
    raise SystemExit(main())
