"""Measures how fast threads read from RAM, which limits the decode speed on a CPU."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

_PROBE_BYTES: Final = 256 << 20
"""More than the last-level cache of a processor."""
_REPEATS: Final = 6


@cache
def ram_bandwidth(threads: int) -> float:
    """Measure the bytes a second that so many threads read from RAM, in about 0.2 s.

    Cached per process, so that variants of a benchmark are compared with the same limit.
    """
    import numpy as np

    values = np.ones(_PROBE_BYTES // 4, dtype=np.float32)
    parts = np.array_split(values, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_REPEATS):
            start_s = time.perf_counter()
            list(pool.map(lambda part: float(part @ part), parts))
            best = max(best, values.nbytes / (time.perf_counter() - start_s))
    return best
