"""Tile configs of the Hopper int4 gemm: a cost model fitted to measurements.

Letters: M rows, N output and K input features, G = K / 128.
"""

from functools import lru_cache
from typing import NamedTuple

from localchat_cuda.kernels.int4.pack import BLOCK_K

FEWEST = 33
MOST = 1024
"""Row counts of the kernel. Smaller counts are bound by the weights' bytes, and have variants of their own."""

_GROUP_US = {(64, 1): 0.484, (64, 2): 0.864, (128, 1): 0.654, (128, 2): 1.305}
"""Time per group of a tile by (rows, blocks).

Two warpgroups run on a multiprocessor of an H200.
"""
_EVEN = 1.29
_END_US = 0.5
_START_US = 2.5
"""Slowdown per group with `even`; cost of a tile's end per 64 x 64 sums; cost of a launch."""
_READ_BYTES_US = 2.2e6
"""Rate at which the next kernel reads the sums of all splits."""


class HopperTileConfig(NamedTuple):
    """Tile sizes and work distribution."""

    rows: int
    """Rows of a tile, 64 or 128."""
    blocks: int
    """Blocks of 64 output features per warpgroup, 1 or 2. A fused gemm has two, gate and up."""
    splits: int = 1
    """Programs along K, each with sums of its own."""
    even: bool = False
    """Whether the groups of all tiles are distributed evenly, so that no multiprocessor idles.

    If two programs share a tile, one of them adds up both parts.
    """

    @property
    def features(self) -> int:
        """Return the output features of a tile."""
        return 2 * 64 * self.blocks

    def stages(self, *, fused: bool) -> int:
        """Return the groups in flight at once, as many as shared memory has room for."""
        if self.rows == 64:
            return 5 if self.blocks == 2 else 6
        if self.blocks == 2:
            return 3 if fused else 4
        return 5

    def items(self, rows: int, n: int) -> int:
        """Count the pieces of work: tiles times splits."""
        return -(-rows // self.rows) * (n // self.features) * self.splits

    def fits(self, n: int, k: int, *, fused: bool) -> bool:
        """Return whether it divides a weight of N x K."""
        sound = self.rows in (64, 128) and self.blocks in (1, 2) and n % self.features == 0
        halves = not fused or (self.blocks == 2 and self.splits == 1)
        splits_fit = self.splits == 1 or not self.even
        return (
            sound
            and halves
            and splits_fit
            and k % BLOCK_K == 0
            and 1 <= self.splits <= k // BLOCK_K
        )

    def check(self, n: int, k: int, *, fused: bool) -> None:
        if not self.fits(n, k, fused=fused):
            kind = "gate-and-up weight" if fused else "weight"
            raise ValueError(f"config: {self} does not divide a {kind} of {n}x{k}")

    def microseconds(self, rows: int, n: int, k: int, sms: int) -> float:
        """Estimate the time on an H200 with `sms` multiprocessors, including the reading of the sums.

        Within 9 % for nine in ten of 597 measured gemms of models from 1.5 to 14 billion parameters.
        """
        group = _GROUP_US[self.rows, self.blocks]
        end = _END_US * self.rows * self.blocks / 64
        items = self.items(rows, n)
        groups = k // BLOCK_K
        if self.even:
            return _START_US + -(-items * groups // sms) * group * _EVEN + 2 * end
        read = self.splits * rows * n * 4 / _READ_BYTES_US
        return _START_US + -(-items // sms) * (-(-groups // self.splits) * group + end) + read


@lru_cache(maxsize=512)
def tile_config_for(rows: int, n: int, k: int, sms: int, fused: bool) -> HopperTileConfig | None:
    """Choose the config of least estimated time for a weight of N x K.

    `fused`: gate and up, with act_and_mul. None where gemm_tiled.py is used: other row counts, and weights too
    small for half of the multiprocessors. Of 120 gemms of four models the choice is at most 5 % slower than the
    best one, but for five (once 15 %), and 1.35 times as fast as gemm_tiled.py (median; 0.95 to 2.3).
    """
    if not FEWEST <= rows <= MOST:
        return None
    tiles: tuple[int, ...] = (64, 128)
    if rows <= 64:
        tiles = (64,)
    elif rows > 256:
        tiles = (128,)
    max_splits = 1 if fused else 11
    configs = [
        HopperTileConfig(tile, blocks, splits)
        for tile in tiles
        for blocks in (2, 1)
        for splits in range(1, max_splits + 1)
    ]
    configs += [HopperTileConfig(tile, 2, even=True) for tile in tiles]
    candidates = [
        (config.microseconds(rows, n, k, sms), config)
        for config in configs
        if config.fits(n, k, fused=fused)
        and config.items(rows, n) >= (sms if config.even else 0.45 * sms)
    ]
    return min(candidates)[1] if candidates else None
