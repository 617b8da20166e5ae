"""Ends the completion of a gap early, by indentation or by time."""

import time
from collections.abc import Callable
from typing import Final

_BLANK: Final = " \t"


class LineStop:
    """An EarlyStop that ends the text at a line. The start of a line waits until its indentation is known."""

    def __init__(
        self,
        indent: int,
        limit_s: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """indent: spaces and tabs required at the start of every line but the first. A line with fewer ends the
        text and is left out; empty lines do not count. limit_s: seconds since the first piece, after which the
        text ends with its line. None sets no limit."""
        self._indent = indent
        self._limit_s = limit_s
        self._clock = clock
        self._started_s: float | None = None
        self._line_start = ""

    def push(self, text: str) -> tuple[str, bool]:
        """See EarlyStop."""
        if self._started_s is None:
            self._started_s = self._clock()
        stopped = False
        if self._indent > 0:
            text, stopped = self._cut_at_outdent(text)
        if "\n" in text and not stopped and self._is_late():
            return text[: text.index("\n") + 1], True
        return text, stopped

    def flush(self) -> str:
        """See EarlyStop."""
        line_start = self._line_start
        self._line_start = ""
        return line_start

    def _is_late(self) -> bool:
        assert self._started_s is not None
        return self._limit_s is not None and self._clock() - self._started_s > self._limit_s

    def _cut_at_outdent(self, text: str) -> tuple[str, bool]:
        text = self._line_start + text
        self._line_start = ""
        newline = text.find("\n")
        while newline >= 0:
            line = newline
            while line < len(text) and text[line] in "\r\n":
                line += 1
            content = line
            while content < len(text) and text[content] in _BLANK:
                content += 1
            if content == len(text):
                self._line_start = text[newline:]
                return text[:newline], False
            if content - line < self._indent and text[content] not in "\r\n":
                return text[:newline], True
            newline = text.find("\n", content)
        return text, False
