"""Index of saved prefixes by their tokens, one sorted list for each salt.

In the order of their bytes, the texts with the longest common prefix with a given one stand next to its place,
so a search costs a bisection and a few neighbours, however many are saved. The prefix tree of the paged cache
(prefix_tree.py) answers by whole blocks; states of slots end at any token and are few and long.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from localchat.core.kv_cache.token_prefix import Ids, TokenPrefix

_LAST = 1 << 62
"""Above every key: the place after all entries with the same tokens."""


class _SavedPrefix(NamedTuple):
    tokens: bytes
    key: int


class PrefixIndex:
    """Keys by token ids (int32). Several keys may have the same tokens."""

    def __init__(self) -> None:
        self._salts: dict[str, list[_SavedPrefix]] = {}

    def add(self, salt: str, ids: Ids, key: int) -> None:
        """Add a key that is not there yet."""
        insort(self._salts.setdefault(salt, []), _SavedPrefix(ids.tobytes(), key))

    def remove(self, salt: str, ids: Ids, key: int) -> None:
        """Remove a key that was added with the same salt and tokens."""
        entries = self._salts[salt]
        place = bisect_left(entries, _SavedPrefix(ids.tobytes(), key))
        assert entries[place].key == key, "a saved prefix is not in the index"
        del entries[place]
        if not entries:
            del self._salts[salt]

    def nearest(self, salt: str, ids: Ids, most: int) -> list[int]:
        """Up to `most` keys on each side of the place of `ids`: those with the longest common prefixes."""
        entries = self._salts.get(salt, [])
        place = bisect_left(entries, _SavedPrefix(ids.tobytes(), 0))
        return [entry.key for entry in entries[max(0, place - most) : place + most]]

    def extensions(self, salt: str, ids: Ids) -> Iterator[int]:
        """Keys whose tokens begin with `ids`, equal ones included."""
        tokens = ids.tobytes()
        entries = self._salts.get(salt, [])
        for entry in islice(entries, bisect_left(entries, _SavedPrefix(tokens, 0)), None):
            if not entry.tokens.startswith(tokens):
                return
            yield entry.key

    def prefixes(self, salt: str, ids: Ids) -> list[int]:
        """Keys of which `ids` are an extension, equal ones included, the longest first."""
        entries = self._salts.get(salt, [])
        tokens = ids.tobytes()
        found: list[int] = []
        # Nothing before a neighbour shares more than it does: go on with the part that it shares.
        place = bisect_left(entries, _SavedPrefix(tokens, _LAST))
        while place:
            before = entries[place - 1]
            if tokens.startswith(before.tokens):
                found.append(before.key)
                place -= 1
                continue
            shared = TokenPrefix(np.frombuffer(before.tokens, np.int32)).common_length(ids)
            place = bisect_left(entries, _SavedPrefix(ids[:shared].tobytes(), _LAST))
        return found
