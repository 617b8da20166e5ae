"""Tokens of a sequence and their counts, for penalties."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """The known tokens of one sequence, and counts over them.

    They are a pure function of the tokens. Drafts are written like any other tokens, and rejected drafts are
    overwritten, at the cost of the tokens that change. Only distinct tokens have an entry, in the order of
    their first occurrence. So removing tokens from the end empties entries from the end, and the arrays stay
    dense.
    """

    def __init__(self, tokens: Sequence[int], prompt_tokens: int) -> None:
        """`prompt_tokens`: number of leading positions that count as prompt, even if rewritten."""
        self._prompt_tokens = prompt_tokens
        self._tokens: list[int] = []
        self._sequence = np.zeros(64, np.int64)
        self._entry: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._seen = np.zeros(64, np.int32)
        self._output = np.zeros(64, np.int32)
        self.write(0, tokens)

    def __len__(self) -> int:
        """Return the number of counted tokens, prompt and output."""
        return len(self._tokens)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens (n,), valid until the next write."""
        return self._ids[: len(self._entry)]

    @property
    def output(self) -> NDArray[np.int32]:
        """Occurrences of each of `ids` after the prompt, (n,)."""
        return self._output[: len(self._entry)]

    @property
    def sequence(self) -> NDArray[np.int64]:
        """All tokens in order, (n,), valid until the next write."""
        return self._sequence[: len(self._tokens)]

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Replace all tokens from `start` on by `tokens`. The cost depends on what differs.

        Raises IndexError if `start` leaves a gap.
        """
        counted = self._tokens
        if start > len(counted):
            raise IndexError(f"token {start} cannot follow {len(counted)} counted tokens")
        same = 0
        overlap = min(len(counted) - start, len(tokens))
        if counted[start : start + overlap] == list(tokens[:overlap]):
            same = overlap
        else:
            while counted[start + same] == tokens[same]:
                same += 1
        self._truncate(start + same)
        new = tokens[same:]
        end = start + len(tokens)
        if end > len(self._sequence):
            self._sequence = np.concatenate((self._sequence, np.zeros(end, np.int64)))
        self._sequence[start + same : end] = new
        for token in new:
            self._append(token)

    def _truncate(self, length: int) -> None:
        counted = self._tokens
        while len(counted) > length:
            position = len(counted) - 1
            token = counted.pop()
            if token < 0:
                continue
            entry = self._entry[token]
            self._seen[entry] -= 1
            if position >= self._prompt_tokens:
                self._output[entry] -= 1
            if not self._seen[entry]:
                del self._entry[token]

    def _append(self, token: int) -> None:
        if token < 0:
            # A picture is no token that could be generated again.
            self._tokens.append(token)
            return
        entry = self._entry.setdefault(token, len(self._entry))
        if entry == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._seen = np.concatenate((self._seen, np.zeros_like(self._seen)))
            self._output = np.concatenate((self._output, np.zeros_like(self._output)))
        self._ids[entry] = token
        self._seen[entry] += 1
        if len(self._tokens) >= self._prompt_tokens:
            self._output[entry] += 1
        self._tokens.append(token)
