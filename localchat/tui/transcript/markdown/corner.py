"""The label in the corner of a code block. A click on it copies the block."""

from typing import Final

from localchat.tui.transcript.markdown.rows import Look, Piece, Row

CORNER_CELLS: Final = 6
"""Width of both labels, `copy` and `copied`."""
_COPIED: Final = Look("code.copied", bold=True)


def corner(number: int) -> Piece:
    """Return the corner of a code block, by its number in the answer."""
    return Piece("copy".rjust(CORNER_CELLS), Look("code.copy", code=number))


def copied(row: Row, number: int) -> Row:
    """Return the row with `copied` in the corner of this code block."""
    pieces = list(row.pieces)
    for index, piece in enumerate(pieces):
        if piece.look.code == number:
            pieces[index] = Piece("copied".rjust(CORNER_CELLS), _COPIED)
    return row._replace(pieces=tuple(pieces))
