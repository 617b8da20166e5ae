"""Kernel variant by row count, and tile configs of the 8-bit gemms.

The configs for one row are measured on an H200. The others follow the rule of int4/tile_config.py: the whole
grid in one wave, 35 to 50 KB of weights in flight for each multiprocessor, splits of K where N alone gives
too few programs.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

W8Variant = Literal["gemv", "small", "tiled", "dequant"]

SMALL_ROWS = 16
TILED_ROWS = 64
"""Largest row counts of the small and the tiled variant. The small one supports 32."""
_LONG = 8192
_WIDE_FEATURES = 32
"""Length of a long row, and the output features per multiprocessor that cost as much."""
_SMALL_WARPS = 18
"""Warps of the small variant per multiprocessor: 2 KB of weights in flight each."""
_MOST_SPLITS = 8
_TILED_PROGRAMS = 3
"""Per multiprocessor: 24 to 32 KB in flight each."""


class W8TileConfig(NamedTuple):
    """Launch configuration of the small and the tiled variant."""

    blocks: int
    """Blocks of 16 output features per warp (small) or per program (tiled)."""
    warps: int
    """Warps along K (small), or of a program (tiled)."""
    splits: int
    """Programs along K."""
    stages: int = 0
    """Pipeline stages (tiled); 0: the small variant."""
    registers: int = 0
    """Register limit for the compiler; 0: none."""

    def check(self, n: int, k: int) -> None:
        """Raise ValueError unless the config divides a weight of N x K."""
        along = 1 if self.stages else self.warps
        if k % (128 * along) or not 1 <= self.splits <= k // (128 * along):
            raise ValueError(f"config: {self} does not divide a weight of {n}x{k}")


class GemvConfig(NamedTuple):
    """Launch configuration of the gemv."""

    rows: int
    """Weight rows of a program."""
    run: int
    """Columns of each row at a time."""
    warps: int
    """Warps that share a run."""
    unroll: int
    """Runs per loop iteration."""


def variant_for(rows: int) -> W8Variant:
    """Choose the variant for a row count; `dequant`: the library's gemm."""
    if rows == 1:
        return "gemv"
    if rows <= SMALL_ROWS:
        return "small"
    if rows <= TILED_ROWS:
        return "tiled"
    return "dequant"


_MEASURED_GEMV: dict[tuple[int, int], GemvConfig] = {
    (37888, 3584): GemvConfig(8, 512, 4, 4),
    (3584, 18944): GemvConfig(2, 2048, 4, 2),
    (4608, 3584): GemvConfig(4, 1024, 2, 2),
    (3584, 3584): GemvConfig(4, 1024, 4, 2),
}
"""Tile configs of a 7B model's gate and up, down, qkv and o by (N, K).

They take 32.2, 18.8, 5.5 and 4.8 us on an H200, 4.2, 3.6, 3.0 and 2.7 TB/s.
"""


@lru_cache(maxsize=512)
def gemv_config(n: int, k: int, sms: int) -> GemvConfig:
    """Choose the config for one row.

    4 KB of weights a program at a time for long rows, else enough programs to fill the GPU.
    """
    if (n, k) in _MEASURED_GEMV:
        return _MEASURED_GEMV[n, k]
    if k >= _LONG:
        return GemvConfig(2, 2048, 4, 2)
    if n >= _WIDE_FEATURES * sms:
        return GemvConfig(8, 512, 4, 4)
    return GemvConfig(4, 1024, 4, 2)


@lru_cache(maxsize=512)
def small_config(rows: int, n: int, k: int, sms: int) -> W8TileConfig:
    """Choose the config for 1 to 32 rows.

    Row counts up to 8, 16 and 32 share a config, so that rows of a class are bit-equal. Larger classes share x
    between two blocks of outputs. It comes from the L1 cache, with twice the bytes of the weights at 32 rows.
    """
    chunks = k // 128
    blocks = -(-n // 16)
    wide = blocks >= 24 * sms or (rows > 16 and n % 32 == 0)
    per_warp = 2 if wide else 1
    warps = 1
    if blocks < 9 * sms:
        warps = next(w for w in (4, 2, 1) if chunks % w == 0)
    programs = -(-blocks // per_warp) * warps
    splits = max(1, min(round(_SMALL_WARPS * sms / programs), chunks // warps, _MOST_SPLITS))
    if rows > 16:
        registers = 168
    else:
        registers = 128 if rows > 8 or wide else 96
    return W8TileConfig(per_warp, warps, splits, registers=registers)


@lru_cache(maxsize=512)
def tiled_config(rows: int, n: int, k: int, sms: int) -> W8TileConfig:
    """Choose the config for 17 to 64 rows.

    A program has 64 output features and four warps, each with the features of one instruction.
    """
    target = max(1, round(_TILED_PROGRAMS * sms / -(-n // 64)))
    stages = 4 if rows <= 32 else 3
    return W8TileConfig(4, 4, min(target, k // 128, _MOST_SPLITS), stages)
