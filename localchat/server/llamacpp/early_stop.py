"""Ends the text of a gap where an editor has no use for more: at a line that leaves the block it began in, and
at the end of the line where its time is up."""

import time
from collections.abc import Callable
from typing import Final

_BLANK: Final = " \t"


class LineStop:
    """See answering.Brake. indent: characters of blank that every line after the first must begin with; a line
    that has fewer is left out with all that follows, empty lines alone do not count. limit_s: from the first
    piece, whatever came before; None: no limit. The start of a line waits here until it shows what it is."""

    def __init__(
        self,
        indent: int,
        limit_s: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._indent = indent
        self._limit_s = limit_s
        self._clock = clock
        self._begun_s: float | None = None
        self._held = ""

    def take(self, text: str) -> tuple[str, bool]:
        """What may be told of the text so far, and whether that is the end of it."""
        if self._begun_s is None:
            self._begun_s = self._clock()
        text, stopped = self._indented(text) if self._indent > 0 else (text, False)
        if "\n" in text and not stopped and self._late():
            return text[: text.index("\n") + 1], True
        return text, stopped

    def rest(self) -> str:
        """What waits, when the text ended by itself."""
        held, self._held = self._held, ""
        return held

    def _late(self) -> bool:
        assert self._begun_s is not None
        return self._limit_s is not None and self._clock() - self._begun_s > self._limit_s

    def _indented(self, text: str) -> tuple[str, bool]:
        whole, self._held = self._held + text, ""
        at = whole.find("\n")
        while at >= 0:
            line = at
            while line < len(whole) and whole[line] in "\r\n":
                line += 1
            begin = line
            while begin < len(whole) and whole[begin] in _BLANK:
                begin += 1
            if begin == len(whole):
                self._held = whole[at:]
                return whole[:at], False
            if begin - line < self._indent and whole[begin] not in "\r\n":
                return whole[:at], True
            at = whole.find("\n", begin)
        return whole, False
