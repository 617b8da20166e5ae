"""Notices an answer that has begun to say the same thing for ever.

Small models fall into a loop that only their token limit ends, minutes later. What counts as one: the last
characters are a single piece, said over and over. That needs to be long (nobody asks for four thousand
characters of one line by accident) and exact, so lists, tables and code with a pattern never count.
"""

from typing import Final

_SPAN: Final = 4096
"""Characters that must repeat."""
_PERIOD: Final = 256
"""The longest piece: it stands sixteen times in the span."""
_EVERY: Final = 512


class RepetitionDetector:
    """Fed with one choice's text. A check costs two searches in C and runs every 512 characters."""

    def __init__(self) -> None:
        self._tail = ""
        self._fresh = 0

    def is_repeating(self, text: str) -> bool:
        """Take the next piece; whether the answer now goes round in circles."""
        self._tail += text
        self._fresh += len(text)
        if self._fresh < _EVERY:
            return False
        self._fresh = 0
        self._tail = self._tail[-_SPAN:]
        return len(self._tail) == _SPAN and _repeats(self._tail)


def _repeats(text: str) -> bool:
    """Whether the text has a period of at most _PERIOD characters: the distance between its end and the
    place where that end stood last. An end as long as the longest period stands nowhere between."""
    before = text.rfind(text[-_PERIOD:], 0, len(text) - 1)
    period = len(text) - _PERIOD - before
    return before >= 0 and period <= _PERIOD and text[period:] == text[:-period]
