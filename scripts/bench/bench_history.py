"""Measures how fast a large history opens, lists, loads and searches.

    PYTHONPATH=. python scripts/bench/bench_history.py

Makes a file of conversations from a seed, then times each operation of a front end, the first
connection separately. The last line is JSON. The target: 10,000 conversations open and search in 100
ms.
"""

import argparse
import json
import platform
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

from localchat.chat.conversation import Conversation
from localchat.engine.request import Message
from localchat.history.store import History
from tests.support.histories import record

WORDS = 20_000
"""Different words; drawn by Zipf's law, as words of a language come."""
SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


def word(number: int) -> str:
    """The word of a rank, of two or more syllables."""
    text = SYLLABLES[number % len(SYLLABLES)]
    while number := number // len(SYLLABLES):
        text += SYLLABLES[number % len(SYLLABLES)]
    return text + "n"


QUERIES = {
    "a rare word": word(WORDS - 10),
    "a common word": word(0),
    "one letter": "b",
    "the beginning of words": "ba",
    "three words": f"{word(3)} {word(17)} {word(120)}",
    "a phrase": f'"{word(0)} {word(1)}"',
    "no such word": "nowhere",
    "Chinese": "天气",
    "a common word with signs": f"{word(0)}++",
    "signs alone": "->",
    "signs that nowhere stand": "=>~",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--messages", type=int, default=10)
    parser.add_argument("--words", type=int, default=60, help="of a message")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.sqlite3"
        begun = time.perf_counter()
        fill(path, options)
        filled_s = time.perf_counter() - begun
        size = path.stat().st_size
        times = measured(path, options.rounds)
    print(
        f"{options.conversations:,} conversations, {size / 1e6:.1f} MB, filled in {filled_s:.1f} s"
    )
    print(f"{'':32}{'median ms':>10}{'worst ms':>10}")
    for name, taken in times.items():
        print(f"{name:32}{statistics.median(taken):10.2f}{max(taken):10.2f}")
    print(
        json.dumps(
            {
                "conversations": options.conversations,
                "messages": options.messages,
                "words": options.words,
                "seed": options.seed,
                "bytes": size,
                "filled_s": round(filled_s, 2),
                "python": platform.python_version(),
                "sqlite": sqlite3.sqlite_version,
                "median_ms": {name: round(statistics.median(t), 2) for name, t in times.items()},
                "worst_ms": {name: round(max(t), 2) for name, t in times.items()},
            },
            ensure_ascii=False,
        )
    )


def fill(path: Path, options: argparse.Namespace) -> None:
    chance = random.Random(options.seed)
    words = [word(number) for number in range(WORDS)]
    weights = list(accumulate(1 / (number + 1) for number in range(WORDS)))
    with History.open(path) as history:
        for number in range(options.conversations):
            conversation = Conversation()
            for turn in range(options.messages):
                text = " ".join(chance.choices(words, cum_weights=weights, k=options.words))
                if number % 1000 == 0 and turn == 0:
                    text += " 今天天气怎么样 a->b"
                role = "assistant" if turn % 2 else "user"
                conversation.add(Message(role, text), parent=conversation.head)
            record(history, conversation, conversation.nodes.values())


def measured(path: Path, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each operation, `rounds` times."""
    times: dict[str, list[float]] = {}

    def measure(name: str, action: Callable[[], object]) -> None:
        begun = time.perf_counter()
        action()
        times.setdefault(name, []).append(1000 * (time.perf_counter() - begun))

    for _ in range(rounds):
        begun = time.perf_counter()
        with History.open(path) as history:
            times.setdefault("open", []).append(1000 * (time.perf_counter() - begun))
            measure("list of 50", partial(history.list, 50))
            newest = history.list(1)[0]
            measure("load the last", partial(history.load, newest.id))
            for name, query in QUERIES.items():
                measure(f"search: {name}", partial(history.search, query, 50))
    return times


if __name__ == "__main__":
    main()
