"""Early stop of a gap fill, by indentation or by time."""

import time
from collections.abc import Callable
from typing import Final

_BLANK: Final = " \t"


class LineStop:
    """An EarlyStop (generation.py) by lines. The start of a line is held back until its indentation is known.

    indent: blanks that every line after the first must begin with; a line with fewer ends the text and is
    left out. Empty lines do not count. limit_s: seconds since the first piece, after which the text ends with
    its line; None: no limit.
    """

    def __init__(
        self,
        indent: int,
        limit_s: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._indent = indent
        self._limit_s = limit_s
        self._clock = clock
        self._started_s: float | None = None
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """See EarlyStop."""
        if self._started_s is None:
            self._started_s = self._clock()
        text, stopped = self._cut_at_outdent(text) if self._indent > 0 else (text, False)
        if "\n" in text and not stopped and self._is_late():
            return text[: text.index("\n") + 1], True
        return text, stopped

    def flush(self) -> str:
        """See EarlyStop."""
        held = self._held
        self._held = ""
        return held

    def _is_late(self) -> bool:
        assert self._started_s is not None
        return self._limit_s is not None and self._clock() - self._started_s > self._limit_s

    def _cut_at_outdent(self, text: str) -> tuple[str, bool]:
        whole = self._held + text
        self._held = ""
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
