#!/usr/bin/env python3
"""Sends bursts of chat requests to a server.

Several processes send them, because one is slower than small models on a GPU.

    scripts/bench/bench_load.py PORT [--clients N ...] [--processes N] [--tokens N] [--fields JSON]

Each burst has N clients with one question each, of scripts/tools/everyday.txt with a number that makes it
new. Fields are added to the requests: '{"temperature": 0}', or '{"model": "NAME"}' for servers that require
it. Prints tokens a second from the first request to the last answer, and times to the first token.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from scripts.bench.server.client import Body, Stream, chat, crowd  # noqa: E402 - found by the path above

_QUESTIONS = (ROOT / "scripts/tools/everyday.txt").read_text().splitlines()
_PAUSE_S = 0.5
"""Between bursts, in which an engine captures graphs or saves KV."""


def main() -> int:
    """Run the bursts and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64, 64, 64])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--fields", type=json.loads, default={})
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes) as pool:
        # Processes start before the first burst.
        list(pool.map(time.sleep, [0.1] * options.processes))
        for clients in options.clients:
            bodies = [_body(options.tokens, options.fields) for _ in range(clients)]
            shares = [
                bodies[n :: options.processes] for n in range(min(clients, options.processes))
            ]
            began_s = time.perf_counter()
            answers = list(chain.from_iterable(pool.map(partial(_burst, options.port), shares)))
            print(_line(clients, answers, time.perf_counter() - began_s), flush=True)
            time.sleep(_PAUSE_S)
    return 0


def _body(tokens: int, fields: Body) -> Body:
    question = f"{random.choice(_QUESTIONS)} (Question {random.randrange(10**6)})"
    return chat(question, tokens, **fields)


def _burst(port: int, bodies: Sequence[Body]) -> list[Stream]:
    return crowd(port, [[body] for body in bodies])[1]


def _line(clients: int, answers: Sequence[Stream], spent_s: float) -> str:
    tokens = sum(answer.tokens for answer in answers)
    firsts_ms = [1e3 * answer.first_s for answer in answers]
    return (
        f"{clients:4} clients: {tokens / spent_s:8.0f} tok/s of {tokens} tokens, first token after "
        f"{statistics.median(firsts_ms):.1f} ms (longest {max(firsts_ms):.1f})"
    )


if __name__ == "__main__":
    raise SystemExit(main())
