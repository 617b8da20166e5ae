"""Replaces fixed phrases in a text that arrives in pieces."""

from collections.abc import Callable, Mapping


class PhraseReplacement:
    """Replaces phrases, and buffers the end of a piece that may start one."""

    def __init__(self, phrases: Mapping[str, Callable[[], str]]) -> None:
        """phrases: replacements by the phrase, called once the text has the phrase. Earlier phrases win."""
        self._phrases = phrases
        self._pending = ""

    def feed(self, text: str) -> str:
        """Add a piece and return the text that can no longer change."""
        text = self._pending + text
        for phrase, replacement in self._phrases.items():
            if phrase in text:
                text = text.replace(phrase, replacement())
        start = self._start_of_phrase(text)
        self._pending = text[start:]
        return text[:start]

    def flush(self) -> str:
        """Return the buffered end of the text."""
        pending = self._pending
        self._pending = ""
        return pending

    def _start_of_phrase(self, text: str) -> int:
        """Return the index of an ending that may become a phrase, or the text's length."""
        max_length = max(map(len, self._phrases), default=1) - 1
        for start in range(max(len(text) - max_length, 0), len(text)):
            if any(phrase.startswith(text[start:]) for phrase in self._phrases):
                return start
        return len(text)
