"""Replaces fixed phrases in a text that arrives in pieces."""

from collections.abc import Mapping


class PhraseReplacement:
    """Replaces phrases, and holds back the end of a piece that may begin one."""

    def __init__(self, phrases: Mapping[str, str]) -> None:
        """phrases: replacements by the phrase. Earlier phrases win."""
        self._phrases = phrases
        self._pending = ""

    def feed(self, text: str) -> str:
        """Add a piece and return the text that is certain."""
        text = self._pending + text
        for phrase, replacement in self._phrases.items():
            text = text.replace(phrase, replacement)
        start = self._start_of_phrase(text)
        self._pending = text[start:]
        return text[:start]

    def flush(self) -> str:
        """Return what was held back, at the end of the text."""
        pending = self._pending
        self._pending = ""
        return pending

    def _start_of_phrase(self, text: str) -> int:
        """Position of an ending that may grow into a phrase; the length of the text if there is none."""
        longest = max(map(len, self._phrases), default=1) - 1
        for start in range(max(len(text) - longest, 0), len(text)):
            if any(phrase.startswith(text[start:]) for phrase in self._phrases):
                return start
        return len(text)
