"""How each W8 product is cut, and which form serves how many rows.

The cuts of one row are measured on an H200. The others follow what their neighbours taught (w4_plan.py): the
whole grid in one wave, 35 to 50 KB of weights on their way for each multiprocessor, splits of K where N alone
gives too few programs.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

W8Variant = Literal["gemv", "small", "tiled", "dequant"]

SMALL_ROWS, TILED_ROWS = 16, 64
"""Most rows of the forms for few and for some. The first one could take 32."""
_LONG, _MANY_FEATURES = 8192, 32
"""Of one row: columns of a long row, and output features for each multiprocessor that are many."""
_SMALL_WARPS = 18
"""Of the form for few rows, on each multiprocessor: 2 KB of weights on their way each."""
_MOST_SPLITS = 8
_TILED_PROGRAMS = 3
"""On each multiprocessor: 24 to 32 KB on their way each."""


@dataclass(frozen=True, slots=True)
class W8TileConfig:
    """blocks: of 16 output features a warp (few) or a program (tiles) owns. warps: side by side along K
    (few), or of a program (tiles). splits: programs along K. stages: of the pipeline (tiles). registers:
    bound for the compiler, 0: none."""

    blocks: int
    warps: int
    splits: int
    stages: int = 0
    registers: int = 0

    def check(self, n: int, k: int) -> None:
        """ValueError unless it divides a weight of N x K."""
        along = 1 if self.stages else self.warps
        if k % (128 * along) or not 1 <= self.splits <= k // (128 * along):
            raise ValueError(f"config: {self} does not divide a weight of {n}x{k}")


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """One row of x: `rows` of the weight a program, `run` columns of each at a time by `warps`, `unroll` times
    a turn. registers: bound for the compiler, 0: none."""

    rows: int
    run: int
    warps: int
    unroll: int
    registers: int = 0


def variant_for(rows: int) -> W8Variant:
    """The form for a number of rows; `dense`: the library's products."""
    if rows == 1:
        return "gemv"
    return "small" if rows <= SMALL_ROWS else "tiled" if rows <= TILED_ROWS else "dequant"


_MEASURED_GEMV: dict[tuple[int, int], GemvConfig] = {
    (37888, 3584): GemvConfig(8, 512, 4, 4),
    (3584, 18944): GemvConfig(2, 2048, 4, 2),
    (4608, 3584): GemvConfig(4, 1024, 2, 2),
    (3584, 3584): GemvConfig(4, 1024, 4, 2),
}
"""Of gate and up, down, qkv and o of a 7B model, (N, K), on an H200: 32.2, 18.8, 5.5 and 4.8 us, 4.2, 3.6, 3.0
and 2.7 TB/s."""


@lru_cache(maxsize=512)
def gemv_config(n: int, k: int, sms: int) -> GemvConfig:
    """One row: 4 KB of weights a program at a time where rows are long, else as many programs as fill the
    multiprocessors."""
    if (n, k) in _MEASURED_GEMV:
        return _MEASURED_GEMV[n, k]
    if k >= _LONG:
        return GemvConfig(2, 2048, 4, 2)
    return GemvConfig(8, 512, 4, 4) if n >= _MANY_FEATURES * sms else GemvConfig(4, 1024, 4, 2)


@lru_cache(maxsize=512)
def small_config(rows: int, n: int, k: int, sms: int) -> W8TileConfig:
    """1 to 32 rows: the same cut for all up to 8, to 16 and to 32, so that rows of a class are bit-equal.
    More rows share x between two blocks of outputs: it comes from the L1 cache, twice the bytes of the
    weights at 32."""
    chunks, blocks = k // 128, -(-n // 16)
    wide = blocks >= 24 * sms or (rows > 16 and n % 32 == 0)
    per_warp = 2 if wide else 1
    warps = 1 if blocks >= 9 * sms else next(w for w in (4, 2, 1) if chunks % w == 0)
    programs = -(-blocks // per_warp) * warps
    splits = max(1, min(round(_SMALL_WARPS * sms / programs), chunks // warps, _MOST_SPLITS))
    registers = 168 if rows > 16 else 128 if rows > 8 or wide else 96
    return W8TileConfig(per_warp, warps, splits, registers=registers)


@lru_cache(maxsize=512)
def tiled_config(rows: int, n: int, k: int, sms: int) -> W8TileConfig:
    """17 to 64 rows: 64 output features a program, four warps, one instruction's worth each."""
    wanted = max(1, round(_TILED_PROGRAMS * sms / -(-n // 64)))
    stages = 4 if rows <= 32 else 3
    return W8TileConfig(4, 4, min(wanted, k // 128, _MOST_SPLITS), stages)
