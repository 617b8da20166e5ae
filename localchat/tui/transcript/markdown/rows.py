"""What a layout is made of: rows of pieces, each with a look. Colours come later, from the theme."""

from typing import NamedTuple


class Look(NamedTuple):
    """How a piece of text looks. `tint`: a role that paint.py has a colour for. `link`: http or https only,
    printable ASCII, or empty."""

    tint: str = "text"
    bold: bool = False
    italic: bool = False
    strike: bool = False
    underline: bool = False
    link: str = ""


class Piece(NamedTuple):
    """Text of one look, without line ends; already inert."""

    text: str
    look: Look


class Row(NamedTuple):
    """One row of the screen.

    `lead`: how many of the first pieces are decoration (indent, bullet, bar), which is never
    copied. `joint`: what stood in the source between this row and the next: None is a line end, otherwise the
    white space at which the line was wrapped. `ground`: role of the background, filled to the end of the row,
    empty for none; the first `bare` pieces stand outside of it.
    """

    pieces: tuple[Piece, ...] = ()
    lead: int = 0
    joint: str | None = None
    ground: str = ""
    bare: int = 0

    @property
    def text(self) -> str:
        """All of the row as shown."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def lead_length(self) -> int:
        """Characters of the decoration."""
        return sum(len(piece.text) for piece in self.pieces[: self.lead])


PLAIN = Look()
MUTED = Look("muted")
EMPTY = Row()
