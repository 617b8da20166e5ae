"""Tile configs of the int4 gemms by kernel variant, weight shape and row count.

Those for the shapes of a 7B model were measured on an H200, inside the kernel chain of a whole model
(the best alone is often not the best in the chain), and hold for GPUs with as many multiprocessors. Others
follow the rule that they suggest: the
whole grid in one wave, 35 to 50 KB of weights in flight for each multiprocessor, splits of K where N
alone gives too few programs.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from localchat_cuda.kernels.int4.pack import BLOCK_K

GemmVariant = Literal["int8", "fp16", "tiled", "dequant"]

_LIMITS: tuple[tuple[int, GemmVariant], ...] = ((8, "int8"), (16, "fp16"), (1024, "tiled"))


class TileConfig(NamedTuple):
    """Launch configuration of an int4 gemm."""

    blocks: int
    """Row blocks of 16 output features per warp."""
    warps: int
    """Warps per program.

    They share the blocks along K (int8, fp16), or have their own blocks along N (tiled: 4 or 8).
    """
    depth: int
    """Chunks loaded before the first is used (tiled: pipeline stages)."""
    splits: int
    """Programs along K."""
    registers: int = 0
    """Register limit for the compiler; 0: none."""

    def fits(self, n: int, k: int, *, wide: bool = False) -> bool:
        """Return whether the config divides a weight of N x K (`wide`: the tiled variant, warps along N)."""
        groups = k // BLOCK_K
        if wide:
            return n % (16 * self.blocks * self.warps) == 0 and self.splits <= groups
        chunks = groups // self.warps
        return (
            n % (16 * self.blocks) == 0
            and groups % self.warps == 0
            and chunks >= self.splits
            and chunks // self.splits >= self.depth
        )

    def check(self, n: int, k: int, *, wide: bool = False) -> None:
        if not self.fits(n, k, wide=wide):
            raise ValueError(f"shape: {self} does not divide a weight of {n}x{k}")


def variant_for(rows: int) -> GemmVariant:
    """Choose the fastest variant for a row count on an H200; `dequant`: dequantize, then the library."""
    for limit, variant in _LIMITS:
        if rows <= limit:
            return variant
    return "dequant"


_GATE_UP = (37888, 3584)
_DOWN = (3584, 18944)
_QKV = (4608, 3584)
_O = (3584, 3584)
"""Qwen2.5-7B, as (N, K)."""
_MIXTURE_QKV = (5120, 2048)
_MIXTURE_O = (2048, 4096)
"""Attention of Qwen3-30B-A3B."""

_MEASURED_SMS = 132
"""Multiprocessors of an H200, as of an H100 on SXM."""
_MEASURED: dict[tuple[GemmVariant, int], dict[tuple[int, int], TileConfig]] = {
    ("int8", 4): {
        _GATE_UP: TileConfig(1, 2, 1, 1, 64),
        _DOWN: TileConfig(1, 4, 1, 5, 64),
        _QKV: TileConfig(1, 4, 1, 4, 64),
        _O: TileConfig(4, 1, 2, 14, 168),
        _MIXTURE_QKV: TileConfig(1, 4, 1, 4, 64),
        _MIXTURE_O: TileConfig(1, 4, 2, 4, 64),
    },
    ("int8", 8): {
        _GATE_UP: TileConfig(2, 2, 1, 1, 96),
        _DOWN: TileConfig(2, 2, 1, 9, 128),
        _QKV: TileConfig(2, 1, 1, 14, 128),
        _O: TileConfig(2, 1, 2, 14, 96),
    },
    ("fp16", 16): {
        _GATE_UP: TileConfig(4, 1, 1, 2, 168),
        _DOWN: TileConfig(2, 2, 1, 9, 168),
        _QKV: TileConfig(2, 1, 1, 7, 168),
        _O: TileConfig(2, 1, 2, 14, 168),
    },
}


_MEASURED_GROUPS: dict[tuple[int, int], dict[tuple[int, int], TileConfig]] = {
    (64, 4): {_GATE_UP: TileConfig(1, 4, 1, 1, 64), _O: TileConfig(1, 4, 1, 4, 96)},
    (32, 4): {
        _GATE_UP: TileConfig(1, 4, 1, 1, 64),
        _QKV: TileConfig(1, 2, 1, 7, 64),
        _O: TileConfig(1, 4, 1, 4, 96),
    },
    (64, 8): {_GATE_UP: TileConfig(1, 2, 1, 1, 96)},
    (32, 8): {_GATE_UP: TileConfig(1, 2, 1, 1, 96)},
}
"""Configs of the int8 variant for smaller groups, measured on an H100.

The rule is as good on other GPUs.
"""


_CLASSES: dict[GemmVariant, tuple[int, ...]] = {
    "int8": (4, 8),
    "fp16": (8, 16),
}


def row_class(variant: GemmVariant, rows: int) -> int:
    """Return the largest row count with the same tile config. Its rows get the same bits."""
    limits = _CLASSES.get(variant, ())
    for limit in limits:
        if rows <= limit:
            return limit
    raise ValueError(
        f"rows: {rows} are more than the {variant} variant takes, at most {max(limits, default=0)}"
    )


@lru_cache(maxsize=512)
def tile_config_for(
    variant: GemmVariant, rows: int, n: int, k: int, sms: int, group: int = BLOCK_K
) -> TileConfig:
    """Choose the tile config of the int8 and fp16 variants (tiled: gemm_tiled.tile_config_for) for a weight.

    Depends on rows only through `row_class`, so that rows of a class are bit-equal. Smaller groups have configs
    of their own: what was measured for groups of 128 takes minutes to compile for them, and spills. ValueError
    if no config divides the weight.
    """
    size = row_class(variant, rows)
    measured = {}
    if group == BLOCK_K:
        measured = _MEASURED.get((variant, size), {})
    elif variant == "int8":
        measured = _MEASURED_GROUPS.get((group, size), {})
    config = measured.get((n, k))
    if config is not None and sms == _MEASURED_SMS:
        return config
    return _narrow(variant, size, n, k, sms)


def _narrow(variant: GemmVariant, size: int, n: int, k: int, sms: int) -> TileConfig:
    """Choose a config whose splits fill the multiprocessors once.

    A multiprocessor takes 10 warps of fp16. Of int8 it takes as many as its registers allow, 32 for up to 4
    rows and 16 for 8.
    """
    groups = k // BLOCK_K
    blocks = 2 if size > 4 and n % 32 == 0 else 1
    max_warps = 2 if size > 4 else 4
    warps = next(w for w in (4, 2, 1) if w <= max_warps and groups % w == 0)
    programs = n // (16 * blocks)
    if programs * warps >= 16 * sms:
        warps = 2 if groups % 2 == 0 else 1
    if variant == "fp16":
        resident = 10
    else:
        resident = 32 if size <= 4 else 16
    target = max(1, round(resident * sms / (programs * warps)))
    splits = min(target, groups // warps, 16)
    config = TileConfig(blocks, warps, 1, splits, 64 if size <= 4 else 128)
    config.check(n, k)
    return config
