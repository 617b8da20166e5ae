"""Repetition detector: notices an answer that repeats the same piece of text forever.

Small models fall into a loop that only the token limit ends, minutes later. A loop is 4096 characters of
exactly one repeated piece, so that lists, tables and code with a pattern never count. Apart from
generation.py because it is a pure function of text with measured constants.
"""

from typing import Final

_SPAN: Final = 4096
"""Characters that must be repetition."""
_PERIOD: Final = 256
"""The longest repeated piece; the span holds it sixteen times."""
_CHECK_EVERY: Final = 512


class RepetitionDetector:
    """Watches the text of one choice. A check takes two string searches and runs every 512 characters."""

    def __init__(self) -> None:
        self._tail = ""
        self._unchecked = 0

    def is_repeating(self, text: str) -> bool:
        """Add the next piece of text. True if the answer repeats itself by now."""
        self._tail += text
        self._unchecked += len(text)
        if self._unchecked < _CHECK_EVERY:
            return False
        self._unchecked = 0
        self._tail = self._tail[-_SPAN:]
        return len(self._tail) == _SPAN and _repeats(self._tail)


def _repeats(text: str) -> bool:
    """True if the text has a period of at most _PERIOD characters.

    The period is the distance between the last _PERIOD characters and their previous occurrence; as they are
    as long as the longest period, no occurrence in between can be missed.
    """
    before = text.rfind(text[-_PERIOD:], 0, len(text) - 1)
    period = len(text) - _PERIOD - before
    return before >= 0 and period <= _PERIOD and text[period:] == text[:-period]
