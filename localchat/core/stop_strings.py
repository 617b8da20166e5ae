"""Stop strings in a text that arrives in pieces."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class StopPatterns:
    """Stop strings of a request as one Aho-Corasick automaton (1975), shared by its choices.

    The cost of a piece depends on its length, not on the number of strings. A state is a node of the trie of
    the strings: the longest suffix of the text so far that may still become a stop string.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        """Empty strings and repetitions are ignored."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str] = [""]
        for string in strings:
            self._insert(string)
        self._link()
        self.starts = frozenset(self._next[0])
        """Characters with which a stop string begins."""

    def __bool__(self) -> bool:
        """Return whether there are stop strings."""
        return len(self._next) > 1

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character. 0 is the initial state."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def held(self, state: int) -> int:
        """Return how many of the last characters may still become a stop string."""
        return self._depth[state]

    def found(self, state: int) -> str:
        """Return the longest stop string that ends here. Empty: none."""
        return self._found[state]

    def _insert(self, string: str) -> None:
        node = 0
        for character in string:
            child = self._next[node].get(character)
            if child is None:
                child = len(self._next)
                self._next[node][character] = child
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append("")
            node = child
        self._found[node] = string

    def _link(self) -> None:
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                self._fail[child] = self.step(self._fail[node], character)
                # A node's own string is longer than that of its suffix.
                self._found[child] = self._found[child] or self._found[self._fail[child]]
                queue.append(child)


class Scan(NamedTuple):
    """Text that may be shown."""

    text: str
    stop: str = ""
    """Stop string that follows the text and ended it. Empty: none."""


class StopScanner:
    """Scans one choice. Text that cannot become a stop string passes at once, and the rest is held.

    The stop string that is complete first wins. If several end at the same character, the longest wins.
    Neither it nor the rest of its piece is shown. Then the scanner starts again.
    """

    def __init__(self, patterns: StopPatterns, *, keep: bool = False) -> None:
        """`keep`: the text includes the stop string."""
        self._patterns = patterns
        self._keep = keep
        self._state = 0
        self._held = ""

    def passes(self, text: str) -> bool:
        """Return whether no stop string is in progress or begins in the text."""
        return not self._state and self._patterns.starts.isdisjoint(text)

    def push(self, text: str) -> Scan:
        """Push the next piece of text."""
        patterns = self._patterns
        if not patterns:
            return Scan(text)
        state = self._state
        text_so_far = self._held + text
        for position, character in enumerate(text, len(self._held) + 1):
            state = patterns.step(state, character)
            stop = patterns.found(state)
            if stop:
                self._state = 0
                self._held = ""
                if not self._keep:
                    position -= len(stop)
                return Scan(text_so_far[:position], stop)
        border = len(text_so_far) - patterns.held(state)
        self._state = state
        self._held = text_so_far[border:]
        return Scan(text_so_far[:border])

    def flush(self) -> str:
        """End the text. Return the held part."""
        text = self._held
        self._state = 0
        self._held = ""
        return text
