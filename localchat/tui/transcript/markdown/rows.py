"""Rows of a layout: pieces of text with a look. The theme adds the colours later (`strips.py`)."""

from typing import NamedTuple

from rich.cells import cell_len

from localchat.tui.pictures.cells import PictureRow


class Look(NamedTuple):
    """Style of a piece, without colours."""

    tint: str = "text"
    """A role with a colour in `strips.py`."""
    bold: bool = False
    italic: bool = False
    strike: bool = False
    underline: bool = False
    link: str = ""
    """An http or https URL in printable ASCII, or empty."""
    code: int = 0
    """Number of the code block that a click copies; 0 for none."""


class Piece(NamedTuple):
    """Sanitized text of one look, without line ends."""

    text: str
    look: Look


class Row(NamedTuple):
    """Row of the screen."""

    pieces: tuple[Piece, ...] = ()
    lead: int = 0
    """Number of first pieces that are decoration (indent, bullet, bar), which is never copied."""
    joint: str | None = None
    """Source text between this row and the next: None for a line end, else the white space of the wrap."""
    ground: str = ""
    """Role of the background, filled to the end of the row; empty for none."""
    bare: int = 0
    """Number of first pieces without that background."""
    picture: PictureRow = ()
    """Row of a picture after the pieces. It is never copied or searched."""

    @property
    def text(self) -> str:
        """The whole row, decoration included."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def lead_length(self) -> int:
        """Number of characters of the decoration."""
        return sum(len(piece.text) for piece in self.pieces[: self.lead])

    def look_at(self, x: int) -> Look:
        """Return the look of cell `x`. A cell behind the pieces has no link and no code."""
        end = 0
        for piece in self.pieces:
            end += cell_len(piece.text)
            if x < end:
                return piece.look
        return PLAIN


PLAIN = Look()
MUTED = Look("muted")
EMPTY = Row()
