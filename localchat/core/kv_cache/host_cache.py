"""Host cache: states of slots saved in RAM, bounded in bytes, least recently used evicted first.

The idea of prompt caching in host memory is llama-server's (`--cache-ram`).
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import NamedTuple

from localchat.backend_api.interface import Discard, Import, MemoryOp, Save, StateRange
from localchat.core.kv_cache.prefix_index import PrefixIndex
from localchat.core.kv_cache.token_prefix import Ids, TokenPrefix

_LOST_KEPT = 32
_NEIGHBOURS = 8
"""States compared on each side of a text's place in the index."""

EVICTED = "evicted to make room"
HOST_CACHE_OFF = "dropped for another conversation, because swapping to RAM is off"
TOO_LARGE = "dropped for another conversation, because it is larger than the RAM for swapping"


class SavedState:
    """One saved state."""

    __slots__ = (
        *("disposable", "earliest", "exact", "key", "last_use", "owner"),
        *("prefix", "salt", "stored"),
    )

    def __init__(
        self,
        key: int,
        salt: str,
        prefix: TokenPrefix,
        earliest: int,
        disposable: bool,
        last_use: int,
        owner: str,
        stored: bool,
        exact: int,
    ) -> None:
        self.key = key
        self.salt = salt
        self.prefix = prefix
        self.earliest = earliest
        """Lowest position that it holds."""
        self.disposable = disposable
        """A branch that its conversation left: an answer that was regenerated, reasoning that the next prompt
        leaves out, a second choice. It is kept only where nothing else needs the room, until it is used."""
        self.last_use = last_use
        self.owner = owner
        """Conversation for which it may go to the disk; empty: it may not."""
        self.exact = exact
        """Leading tokens whose KV has the bits of a fresh computation."""
        self.stored = stored
        """There is nothing of it that has to go to the disk."""


class _LostPrefix(NamedTuple):
    salt: str
    prefix: TokenPrefix
    why: str


class HostCache:
    """Saved states by key, and what was evicted lately. Keys are never used again."""

    def __init__(
        self,
        capacity_bytes: int,
        size_bytes: Callable[[int], int],
        serves: Callable[[int, int, int], bool],
    ) -> None:
        """`serves(length, earliest, tokens)`: whether a state of `length` tokens can be truncated to
        `tokens`."""
        self._capacity_bytes = capacity_bytes
        self._size_bytes = size_bytes
        self._serves = serves
        self._kept: OrderedDict[int, SavedState] = OrderedDict()
        self._disposable: OrderedDict[int, SavedState] = OrderedDict()
        """Both by key, least recently used first."""
        self._index = PrefixIndex()
        self._lost: deque[_LostPrefix] = deque(maxlen=_LOST_KEPT)
        self._bytes = 0
        self._last_key = 0
        self._uses = 0
        self.tokens = 0
        self.evictions = 0

    def candidates(self, ids: Ids, salt: str) -> list[SavedState]:
        """States that a text may continue, most recently used first.

        Those whose whole text it begins with, and the nearest others: as many as share its longest prefix, but
        for more than _NEIGHBOURS that share the same one.
        """
        keys = {*self._index.nearest(salt, ids, _NEIGHBOURS), *self._index.prefixes(salt, ids)}
        return sorted(map(self._state, keys), key=lambda saved: -saved.last_use)

    def _state(self, key: int) -> SavedState:
        if key in self._kept:
            return self._kept[key]
        return self._disposable[key]

    def longest_lost(self, ids: Ids, salt: str) -> tuple[int, str]:
        """The longest prefix of `ids` among the states lost lately, and how it was lost."""
        found = (
            (lost.prefix.common_length(ids), lost.why) for lost in self._lost if lost.salt == salt
        )
        return max(found, key=lambda pair: pair[0], default=(0, ""))

    def touch(self, saved: SavedState) -> None:
        """Mark a state as used now."""
        self._disposable.pop(saved.key, None)
        self._kept[saved.key] = saved
        self._kept.move_to_end(saved.key)
        saved.disposable = False
        saved.last_use = self._next_use()

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def next_key(self) -> int:
        """A key never used before."""
        self._last_key += 1
        return self._last_key

    def save(
        self,
        slot: int,
        salt: str,
        prefix: TokenPrefix,
        earliest: int,
        *,
        disposable: bool,
        pinned: SavedState | None,
        owner: str = "",
        stored: bool = True,
        exact: int = 0,
    ) -> list[MemoryOp]:
        """Save a slot's state, unless a saved one serves as well; what does not fit is lost.

        `pinned` is not evicted for it.
        """
        return self._keep(
            lambda key: Save(slot, key),
            salt,
            prefix,
            earliest,
            disposable,
            pinned,
            owner,
            stored,
            exact,
        )

    def adopt(
        self,
        ranges: tuple[StateRange, ...],
        salt: str,
        prefix: TokenPrefix,
        earliest: int,
        exact: int = 0,
    ) -> list[MemoryOp]:
        """Save a state that was read from the disk."""
        return self._keep(
            lambda key: Import(key, ranges), salt, prefix, earliest, False, None, "", True, exact
        )

    def _keep(
        self,
        operation: Callable[[int], MemoryOp],
        salt: str,
        prefix: TokenPrefix,
        earliest: int,
        disposable: bool,
        pinned: SavedState | None,
        owner: str,
        stored: bool,
        exact: int,
    ) -> list[MemoryOp]:
        """Keep what `operation` puts under its key."""
        ids = prefix.ids
        for saved in map(self._state, islice(self._index.extensions(salt, ids), _NEIGHBOURS)):
            serves = self._serves(len(saved.prefix), saved.earliest, len(prefix))
            if serves and saved.exact >= exact:
                if not disposable:
                    self.touch(saved)
                return []
        older = [
            saved
            for saved in map(self._state, self._index.prefixes(salt, ids))
            if saved is not pinned
            and exact >= saved.exact
            and self._serves(len(prefix), earliest, len(saved.prefix))
        ]
        size = self._size_bytes(len(prefix))
        kept = prefix.head(len(prefix))
        victims = self._victims(size, older, disposable, pinned)
        if victims is None:
            fits = size <= self._capacity_bytes
            why = EVICTED if fits else TOO_LARGE if self._capacity_bytes else HOST_CACHE_OFF
            self.record_lost(salt, kept, why)
            return []
        ops: list[MemoryOp] = [self._remove(saved) for saved in (*older, *victims)]
        for saved in victims:
            self.record_lost(saved.salt, saved.prefix, EVICTED)
        key = self.next_key()
        used = self._next_use()
        saved = SavedState(key, salt, kept, earliest, disposable, used, owner, stored, exact)
        (self._disposable if disposable else self._kept)[key] = saved
        self._index.add(salt, kept.ids, key)
        self._bytes += size
        self.tokens += len(kept)
        return [*ops, operation(key)]

    def unstored(self) -> Iterator[SavedState]:
        """States that may go to the disk, the least recently used first."""
        return (saved for saved in self._kept.values() if saved.owner and not saved.stored)

    def _victims(
        self, size: int, older: list[SavedState], disposable: bool, pinned: SavedState | None
    ) -> list[SavedState] | None:
        """States to evict, besides `older`, before `size` bytes fit; None: they can never fit.

        Disposable states go first, others only for a state that is not disposable itself.
        """
        short = self._bytes + size - self._capacity_bytes
        short -= sum(self._size_bytes(len(saved.prefix)) for saved in older)
        victims: list[SavedState] = []
        for saved in chain(self._disposable.values(), () if disposable else self._kept.values()):
            if short <= 0:
                break
            if saved is not pinned and saved not in older:
                victims.append(saved)
                short -= self._size_bytes(len(saved.prefix))
        return victims if short <= 0 else None

    def record_lost(self, salt: str, prefix: TokenPrefix, why: str) -> None:
        """Remember a prefix that can no longer be found, and count it."""
        self.evictions += 1
        self._lost.append(_LostPrefix(salt, prefix, why))

    def _remove(self, saved: SavedState) -> Discard:
        del (self._disposable if saved.disposable else self._kept)[saved.key]
        self._index.remove(saved.salt, saved.prefix.ids, saved.key)
        self._bytes -= self._size_bytes(len(saved.prefix))
        self.tokens -= len(saved.prefix)
        return Discard(saved.key)

    def check(self) -> None:
        """Check integrity; raises AssertionError naming the fault."""
        states = {**self._kept, **self._disposable}
        sizes = [len(saved.prefix) for saved in states.values()]
        assert self.tokens == sum(sizes), "saved tokens are miscounted"
        assert self._bytes == sum(map(self._size_bytes, sizes)), "saved bytes are miscounted"
        assert self._bytes <= self._capacity_bytes, "more is saved than there is room for"
        assert all(key == saved.key for key, saved in states.items()), (
            "a state stands under another key"
        )
        assert all(saved.disposable == (key in self._disposable) for key, saved in states.items())
        for key, saved in states.items():
            assert key in self._index.prefixes(saved.salt, saved.prefix.ids), "a state is not found"
