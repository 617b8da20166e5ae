"""Cells of a row of a picture."""

from typing import NamedTuple, TypeAlias

Rgb: TypeAlias = tuple[int, int, int]


class PictureCells(NamedTuple):
    """Neighboring cells of one style, or a control sequence."""

    text: str
    color: Rgb | None = None
    ground: Rgb | None = None
    is_control: bool = False
    """Whether the text takes no cells."""


PictureRow: TypeAlias = tuple[PictureCells, ...]
