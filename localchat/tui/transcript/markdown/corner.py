"""The word in the corner of a code block that copies it."""

from typing import Final

from rich.cells import cell_len

from localchat.tui.transcript.markdown.rows import Look, Piece, Row

CORNER_CELLS: Final = 6
"""Width of the word, whether it says that a click copies, or that it has copied."""
_COPIED: Final = Look("code.copied", bold=True)


def corner(number: int) -> Piece:
    """The corner of a code block, by its number in the answer."""
    return Piece("copy".rjust(CORNER_CELLS), Look("code.copy", code=number))


def code_at(row: Row, x: int) -> int:
    """The number of the code block whose corner is in cell `x` of a row; 0 if there is none."""
    at = 0
    for piece in row.pieces:
        at += cell_len(piece.text)
        if x < at:
            return piece.look.code
    return 0


def copied(row: Row, number: int) -> Row:
    """The row with a corner that says that this block was copied."""
    pieces = (
        Piece("copied".rjust(CORNER_CELLS), _COPIED) if piece.look.code == number else piece
        for piece in row.pieces
    )
    return row._replace(pieces=tuple(pieces))
