"""Index of saved prefixes by their tokens, one sorted list for each salt.

Texts are sorted by their bytes, so those that share the longest prefix with a given text are its neighbors. A
search costs a bisection and a few neighbors, no matter how many texts are saved. The prefix tree of the paged
cache (prefix_tree.py) finds whole blocks, but states of slots end at any token, and are few and long.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from localchat.core.kv_cache.token_prefix import Ids, TokenPrefix

_LAST = 1 << 62
"""Above every key, so that it sorts after all entries with the same tokens."""


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
        index = bisect_left(entries, _SavedPrefix(ids.tobytes(), key))
        assert entries[index].key == key, "a saved prefix is not in the index"
        del entries[index]
        if not entries:
            del self._salts[salt]

    def nearest(self, salt: str, ids: Ids, limit: int) -> list[int]:
        """Return up to `limit` keys on each side of `ids`. They share the longest prefixes."""
        entries = self._salts.get(salt, [])
        index = bisect_left(entries, _SavedPrefix(ids.tobytes(), 0))
        return [entry.key for entry in entries[max(0, index - limit) : index + limit]]

    def extensions(self, salt: str, ids: Ids) -> Iterator[int]:
        """Yield the keys whose tokens begin with `ids`, equal ones included."""
        tokens = ids.tobytes()
        entries = self._salts.get(salt, [])
        for entry in islice(entries, bisect_left(entries, _SavedPrefix(tokens, 0)), None):
            if not entry.tokens.startswith(tokens):
                return
            yield entry.key

    def prefixes(self, salt: str, ids: Ids) -> list[int]:
        """Return the keys whose tokens are a prefix of `ids`, or equal. The longest goes first."""
        entries = self._salts.get(salt, [])
        tokens = ids.tobytes()
        keys: list[int] = []
        # No entry before a neighbor shares more than the neighbor, so continue with what it shares.
        index = bisect_left(entries, _SavedPrefix(tokens, _LAST))
        while index:
            before = entries[index - 1]
            if tokens.startswith(before.tokens):
                keys.append(before.key)
                index -= 1
                continue
            shared = TokenPrefix(np.frombuffer(before.tokens, np.int32)).common_length(ids)
            index = bisect_left(entries, _SavedPrefix(ids[:shared].tobytes(), _LAST))
        return keys
