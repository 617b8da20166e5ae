"""Positions of tokens in models whose pictures have several tokens at one position (M-RoPE).

llama.cpp addresses its cache by positions, and everything else here counts tokens.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple, Self


class SharedPositions(NamedTuple):
    """A picture in a text."""

    start: int
    """Index of its first token."""
    tokens: int
    positions: int
    """Positions that its tokens take, fewer than there are tokens."""


class PositionTable(NamedTuple):
    """The pictures of a text, in order. Empty for models without such positions."""

    rows: tuple[SharedPositions, ...] = ()

    def position(self, tokens: int) -> int:
        """Return the position of token number `tokens`, or of the end of the picture that contains it."""
        position = tokens
        for row in self.rows:
            if row.start >= tokens:
                break
            position += row.positions - min(row.tokens, tokens - row.start)
        return position

    def token(self, position: int) -> int:
        """Return the first token at a position or after it."""
        tokens = position
        for row in self.rows:
            if row.start >= tokens:
                break
            tokens += row.tokens - row.positions
        return tokens

    def part(self, start: int, end: int) -> "PositionTable":
        """Return the pictures that begin between two tokens."""
        return PositionTable(tuple(row for row in self.rows if start <= row.start < end))

    def plus(self, other: "PositionTable") -> "PositionTable":
        """Return the pictures of both, where `other` comes later in the text."""
        return PositionTable((*self.rows, *other.rows))

    def encode(self) -> bytes:
        """Return the table as bytes that end with the number of rows."""
        numbers = [number for row in self.rows for number in row]
        return struct.pack(f"<{len(numbers) + 1}i", *numbers, len(self.rows))

    @classmethod
    def split(cls, data: memoryview) -> tuple[memoryview, Self]:
        """Split bytes that end with an encoded table into the bytes before it, and the table."""
        (count,) = struct.unpack_from("<i", data, len(data) - 4)
        start = len(data) - 4 - 12 * count
        rows = struct.iter_unpack("<3i", data[start : len(data) - 4])
        return data[:start], cls.of(rows)

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int]]) -> Self:
        """Return the table of (start, tokens, positions)."""
        return cls(tuple(SharedPositions(*row) for row in rows))


NO_TABLE = PositionTable()
