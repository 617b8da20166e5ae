"""Packs conversations into rows of tokens for training, in many processes.

A row begins with a conversation, as every prompt does; the last one in a row may be cut off.
"""

from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from conversations import SHARES, conversations, read_facts
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokens import PAD, encode, train_tokenizer

BATCH: Final = 250
PARTS: Final = 100  # of the text: small, so that training can begin early
WRITING_S: Final = 180  # no part takes this long; a stuck one must not waste GPU time


class Rows(NamedTuple):
    """`ids` (N, T) uint16 and `own` (N, T) uint8: 1 for tokens that the model must write itself."""

    ids: NDArray[np.uint16]
    own: NDArray[np.uint8]


def make_tokenizer(facts: Path, seed: int, conversations_count: int) -> Tokenizer:
    """Train the vocabulary on the first conversations of a seed. Other languages are left out: the
    guide answers in English only, so their words get no tokens.
    """
    stream = islice(conversations(read_facts(facts), seed, foreign=0.0), conversations_count)
    return train_tokenizer(text for _, talk in stream for _, text in talk)


def write_rows(facts: Path, tokenizer: str, seed: int, rows: int, length: int) -> Rows:
    """`rows` full rows of one seed. `tokenizer`: its JSON."""
    coder = Tokenizer.from_str(tokenizer)
    stream = conversations(read_facts(facts), seed)
    ids = np.full((rows, length), PAD, np.uint16)
    own = np.zeros((rows, length), np.uint8)
    row = at = 0
    while True:
        for tokens, mine in encode(coder, [talk for _, talk in islice(stream, BATCH)]):
            n = min(len(tokens), length - at)
            ids[row, at : at + n] = tokens[:n]
            own[row, at : at + n] = mine[:n]
            at += n
            if at == length:
                row, at = row + 1, 0
                if row == rows:
                    return Rows(ids, own)


def many_rows(
    pool: ProcessPoolExecutor, facts: Path, tokenizer: str, seed: int, rows: int, length: int
) -> list["Future[Rows]"]:
    """The rows of many seeds, in parts."""
    share = -(-rows // PARTS)
    return [
        pool.submit(write_rows, facts, tokenizer, seed + i, share, length) for i in range(PARTS)
    ]


def writers(count: int) -> ProcessPoolExecutor:
    """A pool of `count` processes, each spawned: in a fork of a process that ran the tokenizer's
    threads the first tokenization hangs.
    """
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def held_out(
    facts: Path, tokenizer: str, seed: int, each: int
) -> dict[str, list[tuple[list[int], list[int]]]]:
    """`each` conversations of every kind from a separate seed, for the loss per kind."""
    coder = Tokenizer.from_str(tokenizer)
    found: dict[str, list[tuple[list[int], list[int]]]] = {kind: [] for kind in SHARES}
    for kind, talk in conversations(read_facts(facts), seed):
        if len(found[kind]) < each:
            found[kind] += encode(coder, [talk])
        elif all(len(f) >= each for f in found.values()):
            return found
    raise AssertionError("the stream has no end")
