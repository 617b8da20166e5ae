"""Tile configs for gemms of 1 to 8 rows with ggml's block formats.

Measured on an H200 with the shapes of a 7B, see commit aea9b9fc. They suggest the rule that other shapes and
cards follow: one wave of programs that are as large as their registers allow, and splits of K where N alone
gives fewer. A program of two row tiles reads x once for both, and has more loads in flight.
"""

from functools import lru_cache

from localchat_cuda.ggml_forms import BLOCK, ROWS
from localchat_cuda.kernels.int4.tile_config import TileConfig

_REGISTERS = 65_536
"""*Warps of a multiprocessor."""
_MAX_SPLITS = 16


@lru_cache(maxsize=512)
def tile_config_for(rows: int, n: int, k: int, sms: int, bits: int) -> TileConfig:
    """Choose the tile config of a weight [n, k] whose codes have at most `bits` bits.

    1, 2, 3 to 4 and 5 to 8 rows have configs of their own, so a row's last bits depend on its company.
    """
    column_blocks = -(-k // BLOCK)
    tiles = -(-n // ROWS)
    two = min(2, column_blocks)
    pairs = -(-tiles // 2)
    wide = tiles >= 12 * sms
    # one column block for each warp of programs of two tiles: less than a wave, but no small part of one
    short = column_blocks <= _MAX_SPLITS and 4 * sms <= pairs * -(-column_blocks // 2) <= 9 * sms
    if (rows <= 4 and short) or (rows == 1 and bits == 8 and wide):
        blocks = 2
        warps = two
        registers = 112
    elif rows in (2, 3, 4) and wide:
        blocks = 1
        warps = 1
        registers = 112
    elif rows <= 4:
        blocks = 1
        warps = two
        registers = 80 if rows <= 2 else 64
    elif tiles >= 48 * sms:  # a head
        blocks = 1
        warps = two
        registers = 96
    elif pairs * column_blocks >= 8 * sms:
        blocks = 2
        warps = 1 if short else two
        registers = 168
    else:
        blocks = 1
        warps = two
        registers = 128
    chunks = -(-column_blocks // warps)
    resident = sms * (_REGISTERS // (32 * warps * registers))
    splits = chunks if short else resident // -(-tiles // blocks)
    return TileConfig(blocks, warps, 1, max(1, min(splits, chunks, _MAX_SPLITS)), registers)
