"""Sums of a payload. The checksum of an entry's file is a hash of them.

They detect damage, not manipulation, and must not take longer than reading. Memory is read once, in few
calls, because other readers wait for Python's lock. Eight 64-bit words that lie 4 KB apart are added, which
gives a grid of an eighth of the size. The sums of its rows and columns are the result. A row has an odd
number of words, so the eight words have different positions in their cache lines, and swapped lines are
detected. A backend whose device can read the blocks computes the sums there.
"""

from collections.abc import Iterator

import numpy as np

GROUP = (8, 509)
"""Rows and columns of the words that are added."""
GROUP_BYTES = 8 * 8 * 509
CHUNK_BYTES = 256 * GROUP_BYTES
"""Bytes that one call sums, which fit into the L3 cache after reading."""


def payload_sums(payload: memoryview) -> bytes:
    """Return the sums of all chunks, columns before rows, followed by the incomplete last group."""
    sums: list[memoryview] = []
    for start, end in chunks(len(payload)):
        words = np.frombuffer(payload[start:end], np.uint64)
        grid = np.add.reduce(words.reshape(-1, *GROUP), axis=1)
        sums += [np.add.reduce(grid, axis=axis).data for axis in (0, 1)]
    return b"".join([*sums, payload_rest(payload)])


def chunks(size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the chunks of a payload, which consist of complete groups."""
    total = size // GROUP_BYTES * GROUP_BYTES
    for start in range(0, total, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, total)


def payload_rest(payload: memoryview) -> memoryview:
    """Return the incomplete last group, which is hashed without summing."""
    return payload[len(payload) // GROUP_BYTES * GROUP_BYTES :]
