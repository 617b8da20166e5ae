#!/usr/bin/env python3
"""Compares the libraries of llama.cpp that are installed: prompt and decode, on models of three sizes.

    PYTHONPATH=.:backends scripts/bench/bench_libraries.py [--threads N] [LIBRARY ...]

LIBRARY is what LOCALCHAT_LLAMACPP_LIBRARY takes: a path, or the name of a source. The models are the guide
and two synthetic ones of the shapes of 0.5B and 1.5B (gate, up and down in Q4_K). One process holds a
library and a model; rounds alternate, and the first is left out. Rates are tokens a second of CPU time
(with one thread, the default, other programs disturb it least) and by the clock; each is the best round.
Prints a table, and as the last line one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from localchat_llamacpp.library_source import VARIABLE
from tests.support.synthetic_gguf import SyntheticModel, write

ROOT = Path(__file__).resolve().parents[2]
_Q4_K = "Q4_K"
_STEP_TOKENS, _CONTEXT_TOKENS = 128, 1024
_KINDS = ("prompt_cpu", "decode_cpu", "prompt", "decode")


class Size(NamedTuple):
    """A model, and how much of it a round computes."""

    model: SyntheticModel | None
    """None: the guide."""
    rounds: int
    prompt_tokens: int
    decode_tokens: int


SIZES = {
    "guide": Size(None, 14, 512, 64),
    "0.5B": Size(SyntheticModel(24, 16, 2, 64, 1024, 4864, _Q4_K), 10, 256, 16),
    "1.5B": Size(SyntheticModel(28, 12, 2, 128, 1536, 8960, _Q4_K), 6, 128, 12),
}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", nargs="*", default=["llama-cpp-python", "xllamacpp"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        _serve(asked.child, asked.threads)
        return 0
    figures: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, size in SIZES.items():
            path = ROOT / "localchat/guide/guide.gguf"
            if size.model is not None:
                path = Path(folder) / f"{name}.gguf"
                write(path, size.model)
            figures[name] = _compared(path, size, asked.libraries, asked.threads)
            for kind in _KINDS:
                rates = {one: round(found[kind], 1) for one, found in figures[name].items()}
                print(f"{name:<6} {kind:<11} {rates}", flush=True)
    print(json.dumps({"threads": asked.threads, "load": os.getloadavg()[0], "rates": figures}))
    return 0


def _compared(
    path: Path, size: Size, libraries: list[str], threads: int
) -> dict[str, dict[str, float]]:
    """Tokens a second of each library, by kind."""
    children = {one: _Child(path, one, threads) for one in libraries}
    rounds: dict[str, list[list[float]]] = {one: [] for one in libraries}
    for number in range(size.rounds):
        for one in libraries if number % 2 else libraries[::-1]:
            rounds[one].append(children[one].measured(size))
    for child in children.values():
        child.close()
    return {
        one: {
            kind: 1 / min(times)
            for kind, times in zip(_KINDS, zip(*found[1:], strict=True), strict=True)
        }
        for one, found in rounds.items()
    }


class _Child:
    """A process with one library and one model."""

    def __init__(self, path: Path, library: str, threads: int) -> None:
        command = [sys.executable, __file__, "--child", str(path), "--threads", str(threads)]
        places = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            command,
            env={
                **os.environ,
                VARIABLE: library,
                "GOMP_SPINCOUNT": "2000",
                "PYTHONPATH": os.pathsep.join(place for place in places if place),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measured(self, size: Size) -> list[float]:
        """Seconds a token, in the order of _KINDS."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{size.prompt_tokens} {size.decode_tokens}\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


def _serve(path: Path, threads: int) -> None:
    """Measure a round for each line of stdin."""
    from localchat_llamacpp.batch import Batch
    from localchat_llamacpp.native import library
    from localchat_llamacpp.native_model import ContextSpec, Placement, load_weights, open_context

    api = library().api
    weights = load_weights(
        path,
        placement=Placement(),
        safe_mode=False,
        total_bytes=1,
        progress=lambda done, total: True,
    )
    spec = ContextSpec(_CONTEXT_TOKENS, 1, _STEP_TOKENS, "f16", False, threads, False)
    context, _ = open_context(weights, spec)
    memory, batch = api.llama_get_memory(context), Batch(_STEP_TOKENS, 2)
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(weights.handle))

    def decode(start: int, width: int) -> None:
        batch.clear()
        batch.add(0, start, [(start * 5 + 7 * n) % vocabulary for n in range(width)], [width - 1])
        if api.llama_decode(context, batch.native):
            raise RuntimeError(f"{path} cannot be decoded")
        api.llama_synchronize(context)

    for line in sys.stdin:
        prompt, tokens = map(int, line.split())
        api.llama_memory_seq_rm(memory, 0, -1, -1)
        marks = [(time.process_time(), time.perf_counter())]
        for start in range(0, prompt, _STEP_TOKENS):
            decode(start, min(_STEP_TOKENS, prompt - start))
        marks.append((time.process_time(), time.perf_counter()))
        for step in range(tokens):
            decode(prompt + step, 1)
        marks.append((time.process_time(), time.perf_counter()))
        times = [
            (marks[part + 1][clock] - marks[part][clock]) / count
            for clock in (0, 1)
            for part, count in enumerate((prompt, tokens))
        ]
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    sys.exit(main())
