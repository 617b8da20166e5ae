"""Wrap an answer at words for a terminal, while it streams."""

import re
import unicodedata
from typing import Final

_FENCES: Final = ("```", "~~~")
_TAB_CELLS: Final = 8
_NOT_AT_LINE_START: Final = frozenset("、。，．：；！？）」』】〉》〕ー…")
"""Chinese and Japanese characters that cannot start a line. Others may be separated anywhere."""
_COLUMN: Final = re.compile(r" *\S+(?: \S+)* {2,}(?=\S)")
"""The first column of a list and the space after it."""
_JOINER: Final = "\u200d"


class WordWrap:
    """Wraps text that arrives in pieces. The last word is buffered until it is complete.

    The terminal itself breaks rows of code blocks and tables, and words wider than a line. Text copied from it
    then equals what the model wrote.
    """

    def __init__(self) -> None:
        self._width = 0
        self._column = 0
        self._blanks = ""
        self._word = ""
        self._line = ""
        """The line so far, as the model wrote it."""
        self._fence = ""
        """Fence that closes the current code block. Empty outside of one."""

    def add(self, text: str, width: int) -> str:
        """Return the text to write now. `width` in cells; 0 means unknown, and then nothing is buffered."""
        self._width = width
        return "".join(self._take(character) for character in text)

    def rest(self) -> str:
        """Return the buffered end of a text. The next text starts a new line."""
        text = self._flush_word()
        self._column = 0
        self._line = ""
        self._fence = ""
        return text

    def _take(self, character: str) -> str:
        if character == "\n":
            text = self._flush_word() + "\n"
            self._end_line()
            return text
        self._line += character
        if not self._width or self._fence or self._line.lstrip().startswith(("|", *_FENCES)):
            return self._flush_word() + character
        if character in " \t":
            text = self._flush_word()
            self._blanks += character
            return text
        text = ""
        if self._can_break_before(character):
            text = self._flush_word()
        self._word += character
        return text

    def _can_break_before(self, character: str) -> bool:
        """Return True if a line may end between the buffered word and this character."""
        if not self._word or character in _NOT_AT_LINE_START:
            return False
        if character == _JOINER or self._word.endswith(_JOINER):
            return False
        if unicodedata.category(character) in ("Mn", "Me", "Cf", "Sk"):  # marks, skin tones
            return False
        return _is_wide(character) or _is_wide(self._word[-1])

    def _flush_word(self) -> str:
        """Return the buffered word, on a new line if necessary."""
        if not self._word and not self._blanks:
            return ""
        blanks = self._blanks
        text = self._word
        width = self._width
        self._blanks = ""
        self._word = ""
        word_cells = cells(text)
        blank_cells = len(blanks) + blanks.count("\t") * (_TAB_CELLS - 1)
        room = width - self._column - blank_cells
        if text and width and self._column and room < word_cells <= width:
            self._column = word_cells
            return f"\n{text}"
        self._column += blank_cells + word_cells
        if width and self._column > width:  # the terminal breaks the word
            self._column = (self._column - 1) % width + 1
        return blanks + text

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
    """Wrap a complete text for a terminal of `width` cells. A width of 0 leaves it as it is.

    A line continues below its own indent. A row of a list, whose columns are two spaces apart, continues below
    its second column.
    """
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


def cells(text: str) -> int:
    """Return the width of a text on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # slow to import, and most texts are ASCII

    return cell_len(text)
