#!/usr/bin/env python3
"""Measures how fast the terminal UI is, in a real pseudo-terminal of 120x40.

    scripts/bench/bench_tui.py [PART ...]

`paint`: from fork to the first screen of the real program, which continues a conversation of 20
messages, and to the last of them, compared with a minimal Textual app, alternating, medians of 10.
`engine`: the guide's decode rate under the screen and on the command line, alternating. `typing`: from
a key to its letter on the screen while 300 tokens a second are written below 50,000 tokens, with the
program's share of a core and its memory. `slow`: the same on a terminal that reads 100 KiB/s. `busy`:
the same with every core held by another process. Prints a table, and as the last line one JSON object.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

from scripts.bench.tui import decoding, starting  # noqa: E402
from scripts.bench.tui.programs import MARK  # noqa: E402
from scripts.bench.tui.terminal import Terminal  # noqa: E402

_ALPHABETS = (range(0x100, 0x180), range(0x3B1, 0x3CA), range(0x10D0, 0x10F1), range(0x410, 0x450))
LETTERS = [chr(code) for alphabet in _ALPHABETS for code in alphabet]
"""Letters that no text of the bench has: so each key is distinct from all else on the screen."""

PROGRAM = [sys.executable, "-m", "scripts.bench.tui.programs"]
BUDGETS = {
    "paint_ms": 300.0,
    "paint_ratio": 2.0,
    "engine_loss_percent": 10.0,
    "typing_p95_ms": 30.0,
    "busy_p95_ms": 50.0,
    "slow_p95_ms": 100.0,
    "typing_cpu_percent": 35.0,
    "typing_rss_mib": 100.0,
}
"""At most."""

MetricsSnapshot = dict[str, float]


def main() -> int:
    """Measure and print the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", default=[*PARTS], help=", ".join(PARTS))
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--starts", type=int, default=10, help="of each program")
    parser.add_argument("--tokens", type=int, default=400, help="that the guide writes")
    parser.add_argument("--rate", type=float, default=300.0, help="tokens a second")
    parser.add_argument("--messages", type=int, default=200, help="of 250 tokens each")
    parser.add_argument(
        "--program",
        choices=["app", "widget"],
        default="app",
        help="all of it, or its transcript alone",
    )
    asked = parser.parse_args()
    if unknown := set(asked.parts) - PARTS.keys():
        print(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    figures: MetricsSnapshot = {}
    for part in asked.parts:
        figures |= PARTS[part](asked)
    for name, value in figures.items():
        budget = BUDGETS.get(name)
        verdict = (
            ""
            if budget is None
            else f"  at most {budget:g}: {'ok' if value <= budget else 'MISSED'}"
        )
        print(f"{name:24} {value:10.1f}{verdict}")
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))
    return 0


def paint(asked: argparse.Namespace) -> MetricsSnapshot:
    return starting.measure([*PROGRAM, "bare"], asked.starts)


def engine(asked: argparse.Namespace) -> MetricsSnapshot:
    """The guide's decode rate with and without the screen."""
    return decoding.measure(asked.starts, asked.tokens)


def typing(asked: argparse.Namespace) -> MetricsSnapshot:
    return _typed(asked, "typing")


def slow(asked: argparse.Namespace) -> MetricsSnapshot:
    return _typed(asked, "slow", bytes_per_s=100 * 1024)


def busy(asked: argparse.Namespace) -> MetricsSnapshot:
    """Hold every core with a process of the same niceness."""
    hogs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        return _typed(asked, "busy")
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _typed(asked: argparse.Namespace, name: str, bytes_per_s: int = 0) -> MetricsSnapshot:
    """Type keys at random moments while an answer is written."""
    command = [*PROGRAM, asked.program, str(asked.messages // 2), "500", str(asked.rate)]
    chance = random.Random(5)
    with Terminal(command, bytes_per_s=bytes_per_s) as terminal:
        if terminal.wait_for(MARK, terminal.begun_s) is None:
            raise SystemExit(f"{name}: the program did not start")
        terminal.type(LETTERS[0])
        time.sleep(0.5)
        terminal.type("\r")  # sent, in the program; the answer begins
        time.sleep(3.0)
        begun, cpu, sent = time.monotonic(), terminal.cpu_s(), terminal.total_bytes
        waits: list[float] = []
        for number in range(asked.keys):
            letter = LETTERS[(number + 1) % len(LETTERS)]
            terminal.forget()
            waited = terminal.wait_for(letter, terminal.type(letter))
            waits.append(float("inf") if waited is None else waited * 1e3)
            time.sleep(chance.uniform(0.02, 0.15))
            if number % 20 == 19:
                terminal.type("\x15")  # empties the line
                time.sleep(0.1)
        elapsed = time.monotonic() - begun
        return {
            f"{name}_p50_ms": statistics.median(waits),
            f"{name}_p95_ms": sorted(waits)[int(0.95 * len(waits))],
            f"{name}_max_ms": max(waits),
            f"{name}_cpu_percent": 100 * (terminal.cpu_s() - cpu) / elapsed,
            f"{name}_rss_mib": terminal.rss_mib(),
            f"{name}_kib_per_s": (terminal.total_bytes - sent) / 1024 / elapsed,
        }


PARTS: dict[str, Callable[[argparse.Namespace], MetricsSnapshot]] = {
    "paint": paint,
    "engine": engine,
    "typing": typing,
    "slow": slow,
    "busy": busy,
}

if __name__ == "__main__":
    sys.exit(main())
