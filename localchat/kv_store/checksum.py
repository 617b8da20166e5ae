"""Sums of a payload: what the checksum of its file is a hash of.

They are against damage, not against an enemy, and must not cost more than reading: memory is passed over once,
and few calls take back Python's lock, for which other readers wait. Words of 64 bits are added eight by eight,
4 KB apart; of this grid, an eighth in size, the sums of all rows and all columns are kept. A row has an odd
number of words, so no two of the eight lie alike in a line of 64 bytes, and lines that changed places show. A
backend whose blocks lie where its device reads them adds there.
"""

from collections.abc import Iterator

import numpy as np

GROUP = (8, 509)
"""Words whose columns are added: rows and columns."""
GROUP_BYTES = 8 * 8 * 509
CHUNK_BYTES = 256 * GROUP_BYTES
"""8 MB, summed by one call: it is in the L3 cache where it was just read."""


def payload_sums(payload: memoryview) -> bytes:
    """The sums of all chunks, columns in front of rows, then what is left behind whole groups."""
    sums: list[memoryview] = []
    for start, end in chunks(len(payload)):
        words = np.frombuffer(payload[start:end], np.uint64)
        grid = np.add.reduce(words.reshape(-1, *GROUP), axis=1)
        sums += [np.add.reduce(grid, axis=axis).data for axis in (0, 1)]
    return b"".join([*sums, payload_rest(payload)])


def chunks(size: int) -> Iterator[tuple[int, int]]:
    """First bytes and ends of the chunks of a payload, in whole groups."""
    whole = size // GROUP_BYTES * GROUP_BYTES
    return ((at, min(at + CHUNK_BYTES, whole)) for at in range(0, whole, CHUNK_BYTES))


def payload_rest(payload: memoryview) -> memoryview:
    """What is behind the last whole group, which is hashed as it is."""
    return payload[len(payload) // GROUP_BYTES * GROUP_BYTES :]
