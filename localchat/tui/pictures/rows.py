"""Rows of a picture for each protocol.

Every row stands for itself, so a transcript can scroll, clip and redraw it as it does with text.
"""

import base64
import io
import math
from itertools import groupby
from typing import Final, NamedTuple

import PIL.Image

from localchat.tui.pictures.cells import PictureCells, PictureRow
from localchat.tui.pictures.protocol import CellSize

MAX_COLUMNS: Final = 60
MAX_ROWS: Final = 18
_CHUNK: Final = 4096
"""Characters of a chunk of kitty's protocol."""
_SIXEL_COLORS: Final = 128
_PLACEHOLDER: Final = "\U0010eeee"
_DIACRITICS: Final = tuple(
    map(
        chr,
        (
            *(0x305, 0x30D, 0x30E, 0x310, 0x312, 0x33D, 0x33E, 0x33F, 0x346, 0x34A, 0x34B, 0x34C),
            *(0x350, 0x351, 0x352, 0x357, 0x35B, 0x363, 0x364, 0x365, 0x366, 0x367, 0x368, 0x369),
            *(0x36A, 0x36B, 0x36C, 0x36D, 0x36E, 0x36F, 0x483, 0x484, 0x485, 0x486, 0x487, 0x592),
            *(0x593, 0x594, 0x595, 0x597, 0x598, 0x599, 0x59C, 0x59D, 0x59E, 0x59F, 0x5A0, 0x5A1),
            *(0x5A8, 0x5A9, 0x5AB, 0x5AC, 0x5AF, 0x5C4, 0x610, 0x611, 0x612, 0x613, 0x614, 0x615),
        ),
    )
)
"""Marks of the numbers from 0 on, as kitty's protocol defines them."""


class PictureSize(NamedTuple):
    """Size on the screen, in cells."""

    columns: int
    rows: int


def picture_size(width: int, height: int, max_columns: int, cell: CellSize) -> PictureSize:
    """Return the cells of a picture of these pixels. Small pictures are not enlarged."""
    columns = min(max_columns, MAX_COLUMNS, math.ceil(width / cell.width))
    scale = min(columns * cell.width / width, MAX_ROWS * cell.height / height, 1.0)
    return PictureSize(
        max(1, min(columns, round(width * scale / cell.width))),
        max(1, min(MAX_ROWS, round(height * scale / cell.height))),
    )


def block_rows(picture: PIL.Image.Image, size: PictureSize) -> tuple[PictureRow, ...]:
    """Return rows of half blocks, with two pixels in each cell."""
    width, rows = size
    pixels = picture.resize((width, 2 * rows)).tobytes()
    colors = [(pixels[i], pixels[i + 1], pixels[i + 2]) for i in range(0, len(pixels), 3)]
    result = []
    for row in range(rows):
        start = 2 * row * width
        upper = colors[start : start + width]
        lower = colors[start + width : start + 2 * width]
        runs = groupby(zip(upper, lower, strict=True))
        result.append(
            tuple(PictureCells("▀" * len(list(run)), *cell_colors) for cell_colors, run in runs)
        )
    return tuple(result)


def kitty_rows(number: int, size: PictureSize) -> tuple[PictureRow, ...]:
    """Return rows of placeholders, which the terminal replaces by the picture of this number.

    The foreground color encodes the number, which has 24 bits. Marks encode row and column of each cell.
    """
    color = (number >> 16 & 0xFF, number >> 8 & 0xFF, number & 0xFF)
    return tuple(
        (
            PictureCells(
                "".join(
                    f"{_PLACEHOLDER}{_DIACRITICS[row]}{_DIACRITICS[column]}"
                    for column in range(size.columns)
                ),
                color,
            ),
        )
        for row in range(size.rows)
    )


def kitty_transmission(
    picture: PIL.Image.Image, number: int, size: PictureSize, cell: CellSize
) -> str:
    """Return the sequences that send a picture to the terminal for `kitty_rows`."""
    file = io.BytesIO()
    _fitted(picture, size, cell).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode("ascii")
    chunks = [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)]
    keys = f"a=T,U=1,q=2,f=100,i={number},c={size.columns},r={size.rows},"
    parts = []
    for index, chunk in enumerate(chunks):
        more = int(index + 1 < len(chunks))
        parts.append(f"\x1b_G{keys}m={more};{chunk}\x1b\\")
        keys = "q=2,"
    return "".join(parts)


def kitty_deletion(number: int) -> str:
    """Return the sequence that frees a picture in the terminal."""
    return f"\x1b_Ga=d,d=I,i={number},q=2\x1b\\"


def sixel_rows(
    picture: PIL.Image.Image, size: PictureSize, cell: CellSize
) -> tuple[PictureRow, ...]:
    """Return rows of blank cells, each followed by a sixel picture that is drawn over them."""
    fitted = _fitted(picture, size, cell).quantize(_SIXEL_COLORS)
    palette = fitted.getpalette() or []
    blank = PictureCells(" " * size.columns)
    rows = []
    for row in range(size.rows):
        box = (0, row * cell.height, fitted.width, min((row + 1) * cell.height, fitted.height))
        sixels = _sixels(fitted.crop(box), palette)
        # The cursor returns to its cell: a picture in the last row must not scroll the screen.
        sequence = f"\x1b7\x1b[{size.columns}D{sixels}\x1b8"
        rows.append((blank, PictureCells(sequence, is_control=True)))
    return tuple(rows)


def _fitted(picture: PIL.Image.Image, size: PictureSize, cell: CellSize) -> PIL.Image.Image:
    pixels = (size.columns * cell.width, size.rows * cell.height)
    return picture.resize(pixels, PIL.Image.Resampling.LANCZOS)


def _sixels(picture: PIL.Image.Image, palette: list[int]) -> str:
    """Encode a palette picture as sixels: bands of six rows, and in them one pass for each color."""
    width, height = picture.size
    pixels = picture.tobytes()
    parts = [f'\x1bP0;1q"1;1;{width};{height}']
    for color in sorted(set(pixels)):
        red, green, blue = (part * 100 // 255 for part in palette[3 * color : 3 * color + 3])
        parts.append(f"#{color};2;{red};{green};{blue}")
    for top in range(0, height, 6):
        masks: dict[int, bytearray] = {}
        for offset, y in enumerate(range(top, min(top + 6, height))):
            bit = 1 << offset
            for x, color in enumerate(pixels[y * width : (y + 1) * width]):
                mask = masks.get(color)
                if mask is None:
                    mask = masks[color] = bytearray(width)
                mask[x] |= bit
        parts.append("$".join(f"#{color}{_runs(mask)}" for color, mask in masks.items()) + "-")
    return f"{''.join(parts)}\x1b\\"


def _runs(mask: bytearray) -> str:
    """Return a row of sixels with repeated ones counted."""
    parts = []
    for value, run in groupby(mask.rstrip(b"\0")):
        count = len(list(run))
        sign = chr(63 + value)
        parts.append(f"!{count}{sign}" if count > 3 else sign * count)
    return "".join(parts)
