"""Token bytes to text, piece by piece: never half a code point, never a lost byte."""

import codecs
from collections import deque
from typing import NamedTuple


class Piece(NamedTuple):
    """Text that became whole, and how many more tokens it completes: their bytes are out
    entirely."""

    text: str = ""
    tokens: int = 0


class Detokenizer:
    """Decodes one choice. The pieces and the flush together are exactly `whole.decode("utf-8",
    errors="replace")` of all bytes, whatever the borders between tokens.

    Bytes that may begin a code point wait for the next token; bytes that no longer can are shown as
    U+FFFD at once. Tokens complete in order: one without bytes completes with the text before it.
    """

    def __init__(self, *, strip_leading_space: bool = False) -> None:
        """`strip_leading_space`: drop one space at the very beginning, which SentencePiece
        vocabularies put before the first word of a text."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_leading_space
        self._taken = 0
        self._ends: deque[int] = deque()

    @property
    def held_bytes(self) -> int:
        """Bytes that wait for the rest of their code point, 0 to 3."""
        return len(self._decoder.getstate()[0])

    @property
    def waiting_tokens(self) -> int:
        """Tokens pushed and not yet completed."""
        return len(self._ends)

    def push(self, token_bytes: bytes) -> Piece:
        """Take the bytes of the next token."""
        if self._strip and token_bytes:
            self._strip = False
            token_bytes = token_bytes.removeprefix(b" ")
        self._taken += len(token_bytes)
        self._ends.append(self._taken)
        return Piece(self._decoder.decode(token_bytes), self._complete())

    def flush(self) -> Piece:
        """The end: half a code point that still waits becomes U+FFFD. A later push begins anew."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return Piece(text, self._complete())

    def _complete(self) -> int:
        shown = self._taken - self.held_bytes
        ends, count = self._ends, 0
        while ends and ends[0] <= shown:
            ends.popleft()
            count += 1
        return count
