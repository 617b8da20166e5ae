"""How a terminal shows pictures: kitty's placeholders, sixels or half blocks."""

import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Literal, NamedTuple, TypeAlias

PictureProtocol: TypeAlias = Literal["kitty", "sixel", "blocks", "off"]

_DEFAULT_CELL: Final = (10, 20)
"""Pixels of a cell of DEC's VT340, which terminals without an answer imitate."""
_KITTY_PROGRAMS: Final = ("ghostty", "kitty")
"""Values of TERM_PROGRAM. Other terminals know the protocol, but not its placeholders."""
_SIXEL_PROGRAMS: Final = ("iterm.app", "wezterm", "mintty", "contour", "rio", "bobcat")
_SIXEL_TERMS: Final = ("foot", "mlterm", "contour", "yaft", "vt340", "mintty", "wezterm")


class CellSize(NamedTuple):
    """Size of a terminal cell in pixels."""

    width: int
    height: int


def picture_protocol(
    setting: str, environ: Mapping[str, str], *, color: bool = True
) -> PictureProtocol:
    """Return the protocol of the setting `pictures`, or for `auto` the one of the terminal.

    Multiplexers pass neither kitty's nor sixel's sequences on by default, so they get half blocks. Nothing is
    drawn without colors. The description below each picture is always there.
    """
    match setting:
        case "kitty" | "sixel" | "blocks" | "off":
            return setting
    if not color or environ.get("NO_COLOR") or environ.get("TERM", "dumb") in ("", "dumb", "linux"):
        return "off"
    term = environ.get("TERM", "").lower()
    program = environ.get("TERM_PROGRAM", "").lower()
    if environ.get("TMUX") or environ.get("STY") or term.startswith(("screen", "tmux")):
        return "blocks"
    if "kitty" in term or "ghostty" in term or program in _KITTY_PROGRAMS:
        return "kitty"
    if program in _SIXEL_PROGRAMS or term.startswith(_SIXEL_TERMS) or environ.get("WT_SESSION"):
        return "sixel"
    return "blocks"


def cell_size(file: int) -> CellSize:
    """Return the size of a cell of the terminal at a file descriptor."""
    with suppress(ImportError, OSError):
        import fcntl
        import termios

        reply = fcntl.ioctl(file, termios.TIOCGWINSZ, bytes(8))
        rows, columns, width, height = struct.unpack("HHHH", reply)
        if rows and columns and width >= columns and height >= rows:
            return CellSize(width // columns, height // rows)
    return CellSize(*_DEFAULT_CELL)
