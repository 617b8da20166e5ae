"""Keeps the evaluation set out of the training text: no eight words in a row are shared.

The eval folder is read only as a list of forbidden word runs; conversations with one are dropped.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

RUN_WORDS: Final = 8
EVAL: Final = Path(__file__).resolve().parent / "eval"
_WORD: Final = re.compile(r"[^\W_]+")


def runs(text: str) -> set[tuple[str, ...]]:
    """Every run of eight words, in lower case, ignoring what separates them."""
    words = _WORD.findall(text.lower())
    return {tuple(words[i : i + RUN_WORDS]) for i in range(len(words) - RUN_WORDS + 1)}


def items(name: str, folder: Path = EVAL) -> Iterator[dict[str, Any]]:
    """The lines of one evaluation file: `questions`, `offtopic` or `dialogues`."""
    for line in (folder / f"{name}.jsonl").read_text("utf-8").splitlines():
        item: dict[str, Any] = json.loads(line)
        yield item


def forbidden(folder: Path = EVAL) -> frozenset[tuple[str, ...]]:
    """The word runs of all evaluation questions."""
    found: set[tuple[str, ...]] = set()
    for name in ("questions", "offtopic", "dialogues"):
        for item in items(name, folder):
            for field in ("question", "first", "second"):
                found |= runs(item.get(field, ""))
    return frozenset(found)
