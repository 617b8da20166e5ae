"""Eviction: which files go first. Least seconds of prefill saved per byte, and less the longer unused.

An entry is of no use without its parent, so the ends of texts go before their beginnings.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

HALF_LIFE_S = 7 * 24 * 3600.0
"""An entry that was not used for so long is worth half."""
MOST_FILES = 50_000
"""Entries of very small models: a folder of more files is slow to list."""


class StoredFile(NamedTuple):
    """A file as the eviction sees it."""

    path: Path
    parent: bytes
    key: bytes
    size_bytes: int
    used_s: float
    """When it was last used, in seconds of the clock of files."""
    seconds_per_byte: float
    """Time that computing it again takes."""


def worth(file: StoredFile, now_s: float) -> float:
    """What keeping a file is worth, per byte."""
    age_s = max(0.0, now_s - file.used_s)
    return float(file.seconds_per_byte * 0.5 ** (age_s / HALF_LIFE_S))


def victims(
    files: Iterable[StoredFile], allowed_bytes: int, now_s: float, most_files: int = MOST_FILES
) -> list[StoredFile]:
    """Files to delete, in order, until the rest takes no more than `allowed_bytes`."""
    by_key = {(file.path.parent, file.key): file for file in files}
    children = Counter((file.path.parent, file.parent) for file in by_key.values())
    excess = sum(file.size_bytes for file in by_key.values()) - allowed_bytes
    left = len(by_key)
    leaves = [
        (worth(file, now_s), place)
        for place, (key, file) in enumerate(by_key.items())
        if not children[key]
    ]
    heapq.heapify(leaves)
    ordered = list(by_key.values())
    places = {key: place for place, key in enumerate(by_key)}
    found: list[StoredFile] = []
    while leaves and (excess > 0 or left > most_files):
        file = ordered[heapq.heappop(leaves)[1]]
        found.append(file)
        excess -= file.size_bytes
        left -= 1
        above = (file.path.parent, file.parent)
        children[above] -= 1
        if not children[above] and above in by_key:
            heapq.heappush(leaves, (worth(by_key[above], now_s), places[above]))
    return found
