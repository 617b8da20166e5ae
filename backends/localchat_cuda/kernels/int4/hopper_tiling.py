"""How the W4 product of Hopper GPUs is cut: a rule over what was measured.

Letters: M rows, N output and K input features, G = K / 128.
"""

from functools import lru_cache
from typing import NamedTuple

from localchat_cuda.kernels.int4.pack import GROUP

FEWEST, MOST = 33, 1024
"""Rows that the kernel is for. Fewer are bound by the weights' bytes, and have forms of their own."""

_GROUP_US = {(64, 1): 0.484, (64, 2): 0.864, (128, 1): 0.654, (128, 2): 1.305}
"""By rows and blocks: what a group of a tile takes, two warpgroups on one multiprocessor of an H200."""
_EVEN, _END_US, _START_US = 1.29, 0.5, 2.5
"""Even cuts: each group takes so many times as long. A tile's end: for each 64 x 64 sums. A launch."""
_READ_BYTES_US = 2.2e6
"""The next kernel reads the sums of all splits."""


class HopperTileConfig(NamedTuple):
    """rows: of a tile, 64 or 128. blocks: of 64 output features that each of two warpgroups has, 1 or 2; a
    gated product has two, gate and up. splits: programs along K, each with sums of its own.
    even: all groups of all tiles are dealt out in equal runs, so that no multiprocessor idles in a last round;
    a tile that two programs share is added up by one of them."""

    rows: int
    blocks: int
    splits: int = 1
    even: bool = False

    @property
    def features(self) -> int:
        """Output features of a tile."""
        return 2 * 64 * self.blocks

    def stages(self, *, gated: bool) -> int:
        """Groups on their way at once: what shared memory has room for."""
        if self.rows == 64:
            return 5 if self.blocks == 2 else 6
        if self.blocks == 2:
            return 3 if gated else 4
        return 5

    def items(self, rows: int, n: int) -> int:
        """Pieces of work: tiles times splits."""
        return -(-rows // self.rows) * (n // self.features) * self.splits

    def fits(self, n: int, k: int, *, gated: bool) -> bool:
        """Whether it divides a weight of N x K."""
        sound = self.rows in (64, 128) and self.blocks in (1, 2) and n % self.features == 0
        halves = not gated or (self.blocks == 2 and self.splits == 1)
        whole = self.splits == 1 or not self.even
        return sound and halves and whole and k % GROUP == 0 and 1 <= self.splits <= k // GROUP

    def check(self, n: int, k: int, *, gated: bool) -> None:
        if not self.fits(n, k, gated=gated):
            kind = "gated product" if gated else "product"
            raise ValueError(f"config: {self} does not divide a {kind} of {n}x{k}")

    def microseconds(self, rows: int, n: int, k: int, sms: int) -> float:
        """What it is expected to take on an H200 of so many multiprocessors, and the reading of its sums:
        within 9 % for nine in ten of 597 measured products of models from 1.5 to 14 billion parameters."""
        group = _GROUP_US[self.rows, self.blocks]
        end = _END_US * self.rows * self.blocks / 64
        items, groups = self.items(rows, n), k // GROUP
        if self.even:
            return _START_US + -(-items * groups // sms) * group * _EVEN + 2 * end
        read = self.splits * rows * n * 4 / _READ_BYTES_US
        return _START_US + -(-items // sms) * (-(-groups // self.splits) * group + end) + read


@lru_cache(maxsize=512)
def tile_config_for(rows: int, n: int, k: int, sms: int, gated: bool) -> HopperTileConfig | None:
    """The cut for a weight of N x K (`gated`: gate and up, activated) that is expected to take least; None
    where w4_many.py has it: other numbers of rows, and weights too small for half of the multiprocessors.

    Of 120 products of four models the cut is at most 5 % slower than the best one, but for five (once 15 %),
    and 1.35 times as fast as w4_many.py (median; 0.95 to 2.3)."""
    if not FEWEST <= rows <= MOST:
        return None
    tiles = (64,) if rows <= 64 else (64, 128) if rows <= 256 else (128,)
    configs = [
        HopperTileConfig(tile, blocks, splits)
        for tile in tiles
        for blocks in (2, 1)
        for splits in (range(1, 12) if not gated else (1,))
    ]
    configs += [HopperTileConfig(tile, 2, even=True) for tile in tiles]
    found = [
        (config.microseconds(rows, n, k, sms), config)
        for config in configs
        if config.fits(n, k, gated=gated)
        and config.items(rows, n) >= (sms if config.even else 0.45 * sms)
    ]
    return min(found)[1] if found else None
