"""Eviction: chooses the files to delete.

The least recently used go first. An entry is useless without its parent, so the end of a text goes before its
start.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MAX_FILES = 50_000
"""Very small models reach this number of entries. Listing more files is slow."""


class StoredFile(NamedTuple):
    """Properties of a file that decide its eviction."""

    path: Path
    parent: bytes
    key: bytes
    size_bytes: int
    used_s: float
    """Time of the last use, in seconds since 1970."""


def victims(
    files: Iterable[StoredFile], allowed_bytes: int, max_files: int = MAX_FILES
) -> list[StoredFile]:
    """Return the files to delete, in order, so that the others take at most `allowed_bytes`."""
    by_key = {(file.path.parent, file.key): file for file in files}
    children = Counter((file.path.parent, file.parent) for file in by_key.values())
    excess = sum(file.size_bytes for file in by_key.values()) - allowed_bytes
    remaining = len(by_key)
    # The index breaks ties, so that the order does not depend on the keys.
    indexes = {key: index for index, key in enumerate(by_key)}
    ordered = list(by_key.values())
    leaves = [(file.used_s, indexes[key]) for key, file in by_key.items() if not children[key]]
    heapq.heapify(leaves)
    result: list[StoredFile] = []
    while leaves and (excess > 0 or remaining > max_files):
        file = ordered[heapq.heappop(leaves)[1]]
        result.append(file)
        excess -= file.size_bytes
        remaining -= 1
        parent = (file.path.parent, file.parent)
        children[parent] -= 1
        if not children[parent] and parent in by_key:
            heapq.heappush(leaves, (by_key[parent].used_s, indexes[parent]))
    return result
