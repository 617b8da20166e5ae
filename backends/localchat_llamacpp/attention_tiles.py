"""Prompt widths that fill the tiles of flash attention on a CPU.

llama.cpp divides the rows of all heads into four equal parts per thread, and each part into tiles of up to 64
rows of one head. A tile that is not full costs as much as a full one, because it is padded. Source:
`ggml_compute_forward_flash_attn_ext_f16` of ggml (0.3.36), which the file `ops.cpp` of its CPU backend defines.
"""

TILE_ROWS = 64
"""Rows of a tile. A narrower step has no tiles and reads all KV for each row (0.5B shapes after 3,000 tokens:
37 ms of CPU per token at 32 rows, 20 at 64)."""
_PARTS_PER_THREAD = 4
_MAX_EXCESS = 1.15
"""Tiles over full tiles at which a width counts as efficient."""
_WIDEST = 256
"""A wider step makes other requests wait longer than its tiles are worth."""


def tile_excess(rows: int, heads: int, threads: int) -> float:
    """Return the tiles of a step, divided by those that full tiles would take."""
    total = rows * heads
    part_rows = _divide_up(total, _PARTS_PER_THREAD * threads)
    parts = _divide_up(total, part_rows)
    if threads == 1 or parts < threads:
        parts = threads
    part_rows = _divide_up(total, parts)
    tiles = 0
    for start in range(0, total, part_rows):
        end = min(start + part_rows, total)
        while start < end:
            start += min(TILE_ROWS, end - start, rows - start % rows)
            tiles += 1
    return tiles * TILE_ROWS / total


def prompt_widths(limit: int, heads: int, threads: int) -> tuple[int, ...]:
    """Return the widths of steps with prompts only, up to `limit` rows. The first one is the narrowest.

    Two tiles per head cost 6 % less per row than one, so a step has at least two if the limit allows it.
    """
    widths = tuple(range(TILE_ROWS, limit + 1, TILE_ROWS))
    wide = widths[1:] or widths
    narrow = [width for width in wide if width <= _WIDEST]
    excess = {width: tile_excess(width, heads, threads) for width in narrow}
    efficient = (width for width in narrow if excess[width] <= _MAX_EXCESS)
    first = next(efficient, min(narrow, key=lambda width: excess[width], default=0))
    return tuple(width for width in wide if width >= first)


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)
