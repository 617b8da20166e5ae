"""Breaks an answer at words for a terminal, while it streams."""

import re
import unicodedata
from typing import Final

_FENCES: Final = ("```", "~~~")
_TAB_CELLS: Final = 8
_BEGIN_NO_LINE: Final = frozenset("、。，．：；！？）」』】〉》〕ー…")
"""Of Chinese and Japanese, whose other characters may be parted anywhere."""
_COLUMN: Final = re.compile(r" *\S+(?: \S+)* {2,}(?=\S)")
"""The first column of a list, and the space behind it."""
_JOINER: Final = "\u200d"


class WordWrap:
    """Wraps text that comes in pieces. It holds the last word back until its end is known.

    Rows of code blocks and tables, and words wider than a line, are left to the terminal: copied from it,
    they are what the model wrote."""

    def __init__(self) -> None:
        self._width = self._column = 0
        self._blanks = self._word = ""
        self._line = ""
        """The line so far, as the model wrote it."""
        self._fence = ""
        """Closes the code block."""

    def add(self, text: str, width: int) -> str:
        """What can be written now, in a terminal of `width` cells; 0: it is not known, and nothing is held."""
        self._width = width
        return "".join(self._take(character) for character in text)

    def rest(self) -> str:
        """What was held back at the end of a text. The next text begins a line."""
        held = self._place()
        self._column = 0
        self._line = ""
        self._fence = ""
        return held

    def _take(self, character: str) -> str:
        if character == "\n":
            written = self._place() + "\n"
            self._end_line()
            return written
        self._line += character
        if not self._width or self._fence or self._line.lstrip().startswith(("|", *_FENCES)):
            return self._place() + character
        if character in " \t":
            written = self._place()
            self._blanks += character
            return written
        written = self._place() if self._parts_from_word(character) else ""
        self._word += character
        return written

    def _parts_from_word(self, character: str) -> bool:
        """Whether a line may end between the word so far and this character."""
        if not self._word or character in _BEGIN_NO_LINE:
            return False
        if character == _JOINER or self._word.endswith(_JOINER):
            return False
        if unicodedata.category(character) in ("Mn", "Me", "Cf", "Sk"):  # marks, tones of skin
            return False
        return _is_wide(character) or _is_wide(self._word[-1])

    def _place(self) -> str:
        """Write the word that is held back, on the next line if this one has no room for it."""
        if not self._word and not self._blanks:
            return ""
        blanks = self._blanks
        word = self._word
        width = self._width
        self._blanks = self._word = ""
        wide = cells(word)
        room = width - self._column - sum(_TAB_CELLS if one == "\t" else 1 for one in blanks)
        if word and width and self._column and room < wide <= width:
            self._column = wide
            return f"\n{word}"
        self._column = width - room + wide
        if width and self._column > width:  # the terminal breaks it
            self._column = (self._column - 1) % width + 1
        return blanks + word

    def _end_line(self) -> None:
        line = self._line.strip()
        self._line = ""
        self._column = 0
        if self._fence:
            if line.startswith(self._fence) and not line.strip(self._fence[0]):
                self._fence = ""
        elif line.startswith(_FENCES):
            self._fence = line[: len(line) - len(line.lstrip(line[0]))]


def wrap_at_words(text: str, width: int) -> str:
    """A whole text in a terminal of `width` cells; 0: as it is. A line goes on under its own indent; one of a
    list, whose columns are two spaces apart, under its second column."""
    return "\n".join(_wrapped(line, width) for line in text.split("\n"))


def _wrapped(line: str, width: int) -> str:
    words = line.lstrip(" ")
    indent = len(line) - len(words)
    if (column := _COLUMN.match(line)) and 2 * cells(column[0]) <= width:
        indent = cells(column[0])
        words = line[column.end() :]
    if width <= 2 * indent:
        return line
    wrap = WordWrap()
    rows = wrap.add(words, width - indent) + wrap.rest()
    return line[: len(line) - len(words)] + rows.replace("\n", "\n" + " " * indent)


def _is_wide(character: str) -> bool:
    return not character.isascii() and unicodedata.east_asian_width(character) in "WF"


def cells(word: str) -> int:
    """The width of a text on a terminal."""
    if word.isascii():
        return len(word)
    from rich.cells import cell_len  # not at the start of a program that needs no screen

    return cell_len(word)
