#!/usr/bin/env python3
"""CPU time of llama.cpp's steps by their width, without an engine: prompts, and rows with logits.

    scripts/bench/bench_steps.py MODEL [--threads N] [--tokens N] [--chunks N ...] [--rows N ...]

Prints CPU ms per token of a prompt in chunks of each width, and the cost of N rows with logits relative to one
row. N accepted drafts gain at most (N + 1) / cost(N + 1). Threads sleep at barriers, so that CPU time is right
while other programs use the cores. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
# OpenMP reads it when the library loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np  # noqa: E402 - after the environment
from numpy.typing import NDArray  # noqa: E402

from localchat_llamacpp.batch import Batch  # noqa: E402 - found by the path above
from localchat_llamacpp.native import library  # noqa: E402
from localchat_llamacpp.native_model import (  # noqa: E402
    ContextSpec,
    Placement,
    load_weights,
    open_context,
)

_STEP_TOKENS = 512
_BEFORE_ROWS_TOKENS = 256
"""Tokens in the cache before the rows."""


class Steps:
    """A context, and the CPU time of its steps."""

    def __init__(self, model: Path, threads: int, tokens: int) -> None:
        self._api = library().api
        weights = load_weights(
            model,
            placement=Placement(),
            safe_mode=False,
            total_bytes=model.stat().st_size,
            progress=lambda _done, _total: True,
        )
        spec = ContextSpec(tokens + 64, 1, _STEP_TOKENS, "f16", True, threads, False)
        self._context, _ = open_context(weights, spec)
        self._memory = self._api.llama_get_memory(self._context)
        self._batch = Batch(_STEP_TOKENS, 2)
        vocabulary = self._api.llama_model_get_vocab(weights.handle)
        size = int(self._api.llama_vocab_n_tokens(vocabulary))
        random = np.random.default_rng(1)
        self._tokens: NDArray[np.int64] = random.integers(100, size - 100, tokens + 64)

    def prompt_ms(self, tokens: int, chunk: int) -> float:
        """Return the CPU ms per token of a prompt in chunks."""
        self._api.llama_memory_seq_rm(self._memory, 0, -1, -1)
        spent_ms = 0.0
        for start in range(0, tokens, chunk):
            width = min(chunk, tokens - start)
            outputs = [width - 1] if start + width == tokens else []
            spent_ms += self._step_ms(start, width, outputs)
        return spent_ms / tokens

    def rows_ms(self, rows: int) -> float:
        """Return the CPU ms of a step of rows with logits."""
        self._api.llama_memory_seq_rm(self._memory, 0, _BEFORE_ROWS_TOKENS, -1)
        return self._step_ms(_BEFORE_ROWS_TOKENS, rows, range(rows))

    def _step_ms(self, start: int, width: int, outputs: "range | list[int]") -> float:
        self._batch.clear()
        self._batch.add(0, start, self._tokens[start : start + width].tolist(), outputs)
        began_s = time.process_time()
        status = self._api.llama_decode(self._context, self._batch.native)
        self._api.llama_synchronize(self._context)
        assert status == 0, f"llama_decode: {status}"
        return (time.process_time() - began_s) * 1e3


def main() -> int:
    """Measure all widths in turn, and print medians of prompts and minima of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokens", type=int, default=1536, help="of the prompt; 0: rows only")
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    steps = Steps(asked.model, asked.threads, max(asked.tokens, _BEFORE_ROWS_TOKENS))
    steps.prompt_ms(_BEFORE_ROWS_TOKENS, _BEFORE_ROWS_TOKENS)
    rows: dict[int, list[float]] = {}
    chunks: dict[int, list[float]] = {}
    for number in range(asked.rounds):
        order = 1 if number % 2 == 0 else -1
        for count in asked.rows[::order]:
            rows.setdefault(count, []).append(steps.rows_ms(count))
    for number in range(asked.rounds if asked.tokens else 0):
        order = 1 if number % 2 == 0 else -1
        for chunk in asked.chunks[::order]:
            chunks.setdefault(chunk, []).append(steps.prompt_ms(asked.tokens, chunk))
    one_ms = min(rows[min(rows)])
    costs = {count: round(min(seen) / one_ms, 2) for count, seen in rows.items()}
    prompts = {chunk: round(statistics.median(seen), 3) for chunk, seen in chunks.items()}
    for chunk, token_ms in prompts.items():
        print(f"prompt in chunks of {chunk:4}: {token_ms:8.3f} ms per token")
    for count, cost in costs.items():
        print(f"{count:4} rows cost {cost:6.2f} of one, at most {count / cost:5.2f} times as fast")
    print(
        json.dumps({"threads": asked.threads, "row_ms": one_ms, "rows": costs, "prompt": prompts})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
