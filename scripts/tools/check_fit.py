#!/usr/bin/env python3
"""Compares the predictions of `fit` with reality: memory of the loaded engine, and tokens a second.

    scripts/tools/check_fit.py [--folder DIR] [--quick]

Writes models of different shapes and number formats with random weights (0.2 to 0.6 GB each), assesses
each as `localchat fit` does, loads it through a separate engine and generates. Memory is the peak of
the child process. The speed is predicted from the memory bandwidth. `in_range` says whether the measured speed
lies in the predicted range.
Prints a table and, as the last line, one JSON object.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

from localchat.engine.events import Done  # noqa: E402
from localchat.engine.interface import EngineInfo  # noqa: E402
from localchat.engine.local.engine import LocalEngine  # noqa: E402
from localchat.engine.options import EngineOptions  # noqa: E402
from localchat.engine.request import GenerateRequest, Sampling, TextPrompt  # noqa: E402
from localchat.fit.hardware import read_machine  # noqa: E402
from localchat.fit.load_options import LoadOptions  # noqa: E402
from localchat.model_files.checkpoint import read_summary  # noqa: E402
from localchat.models.assess import FitReport, Subject, assess  # noqa: E402
from tests.support.gguf_files import ARCHITECTURES, F16, Q4_0, Q4_K, Q6_K, Q8_0, Size, Tensor  # noqa: E402

SLOTS = 2
"""Sequences at once, as a chat loads."""


class Case(NamedTuple):
    """A model and how it is loaded. `down`: the format of the down projections, if it differs."""

    name: str
    architecture: str
    size: Size
    kv_type: str
    context_tokens: int
    down: int | None = None


CASES = (
    Case(
        "llama-q8_0",
        "llama",
        Size(16, 1024, 16, 4, 64, 4096, 32_000, 8192, Q8_0),
        "f16",
        8192,
    ),
    Case(
        "qwen2-q4_k",
        "qwen2",
        Size(20, 1536, 12, 2, 128, 6144, 64_000, 16_384, Q4_K),
        "q8_0",
        8192,
        Q6_K,
    ),
    Case(
        "gemma3-q4_0",
        "gemma3",
        Size(18, 1152, 4, 1, 256, 6912, 64_000, 8192, Q4_0, 512),
        "f16",
        4096,
    ),
    Case(
        "llama-deep-q4_k",
        "llama",
        Size(40, 768, 12, 12, 64, 3072, 32_000, 4096, Q4_K),
        "q8_0",
        4096,
    ),
    Case("qwen2-f16", "qwen2", Size(8, 1280, 10, 5, 128, 5120, 48_000, 4096, F16), "f16", 2048),
)


class Seen(NamedTuple):
    """Bytes and tokens a second, predicted and measured."""

    verdict: FitReport
    info: EngineInfo
    peak_bytes: int
    done: Done


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="keep the models here")
    parser.add_argument("--quick", action="store_true", help="two models, few tokens")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as rest:
        folder = asked.folder or Path(rest)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [
            _row(case, _look(case, folder, asked.quick))
            for case in (CASES[:2] if asked.quick else CASES)
        ]
    columns = list(rows[0])
    print(" | ".join(columns))
    for row in rows:
        print(" | ".join(str(row[column]) for column in columns))
    print(json.dumps(rows))
    return 0


def _look(case: Case, folder: Path, quick: bool) -> Seen:
    path = folder / f"{case.name}.gguf"
    if not path.exists():
        write(path, case)
    subject = Subject(case.name, read_summary(path), path)
    load_options = LoadOptions(
        context_tokens=case.context_tokens, kv_type=case.kv_type, max_slots=SLOTS, cache_ram_bytes=0
    )
    verdict = assess(subject, load_options, read_machine(), None)
    options = EngineOptions(path, load=load_options, name=case.name, speculation=False)
    engine = LocalEngine(options, notify=lambda sentence: print(f"  {case.name}: {sentence}"))
    try:
        # The best of several: other programs only ever make an answer slower.
        answers = [_written(engine, 32 if quick else 64) for _ in range(2 if quick else 5)]
        done = max(answers, key=lambda one: one.timings.decode_tokens_per_s or 0.0)
        assert engine.child_pid is not None
        peak = _peak_bytes(engine.child_pid)
        info = engine.info()
    finally:
        engine.close()
    return Seen(verdict, info, peak, done)


def _written(engine: LocalEngine, count: int) -> Done:
    request = GenerateRequest(
        TextPrompt("the quick brown fox " * 20),
        sampling=Sampling(temperature=0.0),
        max_tokens=count,
        speculation=False,
        ignore_eos=True,
    )
    with engine.generate(request) as stream:
        return next(event for event in stream if isinstance(event, Done))


def _peak_bytes(process: int) -> int:
    """VmHWM if /proc has it, else the resident memory now."""
    status = Path(f"/proc/{process}/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process(process).memory_info().rss)


def _row(case: Case, seen: Seen) -> dict[str, Any]:
    plan, rate = seen.verdict.plan, seen.done.timings.decode_tokens_per_s or 0.0
    predicted = plan.total_bytes + plan.mapped_bytes
    # Buffers count whole, whether or not a short text has touched their last page.
    peak = max(seen.peak_bytes, seen.info.actual_bytes)
    speed = seen.verdict.expected_speed
    expected_rate = speed.tokens_per_s if speed else 0.0
    return {
        "model": case.name,
        "kv": case.kv_type,
        "predicted_mb": predicted // 1_000_000,
        "resident_mb": seen.peak_bytes // 1_000_000,
        "actual_mb": seen.info.actual_bytes // 1_000_000,
        "memory_off_percent": round(100 * (predicted / peak - 1), 1),
        "expected": round(expected_rate, 1),
        "measured": round(rate, 1),
        "off_percent": round(100 * (expected_rate / rate - 1), 1),
        "in_range": speed is not None and speed.low <= rate <= speed.high,
    }


# ---------------------------------------------------------------------------- models of random weights

_SCALES = {
    Q4_0: ((0,), 18, 32),
    Q8_0: ((0,), 34, 32),
    Q4_K: ((0,), 144, 256),
    Q6_K: ((208,), 210, 256),
}
"""Position of the scales in a block, its bytes, its numbers."""


def write(path: Path, case: Case) -> None:
    """Write the model with random bits and small scales, so that no sum overflows."""
    whole = ARCHITECTURES[case.architecture](case.size)
    if case.down is not None:
        tensors = [
            one._replace(code=case.down) if "ffn_down" in one.name else one for one in whole.tensors
        ]
        whole = replace(whole, tensors=tensors)
    draw = np.random.default_rng(1)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        file.write(whole.header())
        for tensor in whole.tensors:
            body = _body(tensor, draw)
            file.write(body + bytes(-len(body) % whole.alignment))
    unfinished.rename(path)


_SCALE = 0.0005


def _half(number: float) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array([number], np.float16).view(np.uint8)


def _body(tensor: Tensor, draw: np.random.Generator) -> bytes:
    if tensor.code in _SCALES:
        places, size, _ = _SCALES[tensor.code]
        blocks = draw.integers(0, 256, (tensor.size_bytes // size, size), dtype=np.uint8)
        for place in places:
            blocks[:, place : place + 2] = _half(_SCALE)
        if tensor.code == Q4_K:
            # Its numbers begin at 0: what is taken off again makes them as often negative as positive.
            blocks[:, 0:2], blocks[:, 2:4] = _half(_SCALE / 5), _half(1.5 * _SCALE)
        return blocks.tobytes()
    shape: Sequence[int] = tensor.shape[::-1]
    numbers = (
        np.ones(shape, np.float32)
        if tensor.name.endswith("norm.weight")
        else draw.normal(0, 0.02, shape).astype(np.float32)
    )
    return numbers.astype(np.float16).tobytes() if tensor.code == F16 else numbers.tobytes()


if __name__ == "__main__":
    sys.exit(main())
