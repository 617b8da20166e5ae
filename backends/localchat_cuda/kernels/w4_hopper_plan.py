"""How the W4 product of Hopper GPUs is cut, and where it is taken: tables of what was measured, and a rule.

Letters: M rows, N output and K input features, G = K / 128.
"""

from functools import lru_cache
from typing import NamedTuple

from localchat_cuda.kernels.w4_pack import GROUP

FEWEST, MOST = 33, 1024
"""Rows that the kernel is for. Fewer are bound by the weights' bytes, and have forms of their own."""


class Cut(NamedTuple):
    """rows: of a tile, 64 or 128. blocks: of 64 output features that each of two warpgroups has, 1 or 2; a
    gated product has two, gate and up. splits: programs along K, each with sums of its own.
    even: all groups of all tiles are dealt out in equal runs, so that no multiprocessor idles in a last round;
    a tile that two programs share is added up by one of them. turns: the warpgroups issue products in turn.
    smooth: sums are turned in shared memory, so that they are stored in pieces of 256 bytes, not 32."""

    rows: int
    blocks: int
    splits: int = 1
    even: bool = False
    turns: bool = False
    smooth: bool = False

    @property
    def features(self) -> int:
        """Output features of a tile."""
        return 2 * 64 * self.blocks

    def stages(self, *, gated: bool) -> int:
        """Groups on their way at once: what shared memory has room for."""
        if self.rows == 64:
            return 5 if self.blocks == 2 else 6
        if self.blocks == 2:
            return 3 if gated or self.smooth else 4
        return 4 if self.smooth else 5

    def items(self, rows: int, n: int) -> int:
        """Pieces of work: tiles times splits."""
        return -(-rows // self.rows) * (n // self.features) * self.splits

    def fits(self, n: int, k: int, *, gated: bool) -> bool:
        """Whether it divides a weight of N x K."""
        sound = self.rows in (64, 128) and self.blocks in (1, 2) and n % self.features == 0
        halves = not gated or (self.blocks == 2 and self.splits == 1 and not self.smooth)
        whole = self.splits == 1 or not self.even
        return sound and halves and whole and k % GROUP == 0 and 1 <= self.splits <= k // GROUP

    def check(self, n: int, k: int, *, gated: bool) -> None:
        if not self.fits(n, k, gated=gated):
            kind = "gated product" if gated else "product"
            raise ValueError(f"cut: {self} does not divide a {kind} of {n}x{k}")


_TRUSTED = False
_MEASURED: dict[tuple[int, int, bool], tuple[tuple[int, Cut | None], ...]] = {}
"""Of weights of a 7B model, (N, K, gated), up to so many rows, on an H200; None: w4_many.py is faster.
_TRUSTED: so much was measured, and right, that other shapes follow the rule."""


def cut_for(rows: int, n: int, k: int, sms: int, gated: bool) -> Cut | None:
    """The cut for a weight of N x K (`gated`: gate and up, activated), or None: w4_many.py has it."""
    if not FEWEST <= rows <= MOST:
        return None
    measured = _MEASURED.get((n, k, gated))
    if measured is None:
        return _rule(rows, n, k, sms, gated) if _TRUSTED else None
    return next((cut for limit, cut in measured if rows <= limit), None)


@lru_cache(maxsize=512)
def _rule(rows: int, n: int, k: int, sms: int, gated: bool) -> Cut | None:
    """The cut with the fewest predicted clocks, unless it leaves half of the multiprocessors idle."""
    tiles = (64,) if rows <= 64 else (64, 128) if rows <= 256 else (128,)
    cuts = [
        Cut(tile, blocks, splits)
        for tile in tiles
        for blocks in (2, 1)
        for splits in (range(1, 11) if not gated else (1,))
    ]
    cuts += [Cut(tile, 2, even=True) for tile in tiles]
    found = [
        (_clocks(cut, rows, n, k, sms), cut)
        for cut in cuts
        if cut.fits(n, k, gated=gated) and cut.items(rows, n) >= (sms if cut.even else sms // 2)
    ]
    return min(found)[1] if found else None


def _clocks(cut: Cut, rows: int, n: int, k: int, sms: int) -> float:
    """What a multiprocessor is busy for. A group of a tile: 2,048 products a clock, or 24 bytes a clock out of
    L2 (fp16 rows, half a byte a weight), or 13 instructions for 8 weights; a tile's end: about 10 sums a
    clock, and the next kernel reads them, split by split, at the speed of L2."""
    products = cut.rows * cut.features * GROUP / 2048
    moved = (cut.rows * 2 * GROUP + cut.features * (GROUP // 2 + 4)) / 24
    group = max(products, moved, 1.8 * cut.features) + 150
    end = cut.rows * cut.features / 10
    items, groups = cut.items(rows, n), k // GROUP
    if cut.even:
        return -(-items * groups // sms) * group + 2 * end
    read = cut.splits * rows * n * 4 / (24 * sms)
    return -(-items // sms) * (-(-groups // cut.splits) * group + end) + read
