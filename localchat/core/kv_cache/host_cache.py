"""Host cache: states of slots saved in RAM, bounded in bytes, least recently used evicted first.

The idea of prompt caching in host memory is llama-server's (`--cache-ram`).
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from localchat.backend_api.interface import Discard, MemoryOp
from localchat.core.kv_cache.prefix_index import PrefixIndex
from localchat.core.kv_cache.token_prefix import Ids, TokenPrefix

_LOST_KEPT = 32
_NEIGHBOURS = 8
"""Number of states compared on each side of a text in the index."""

EVICTED = "evicted to make room"
HOST_CACHE_OFF = "dropped for another conversation, because swapping to RAM is off"
TOO_LARGE = "dropped for another conversation, because it is larger than the RAM for swapping"


@dataclass(slots=True, eq=False)
class SavedState:
    """Saved state of a slot."""

    salt: str
    prefix: TokenPrefix
    earliest: int
    """Lowest position in the state."""
    exact: int
    """Leading tokens whose KV has the bits of a fresh computation."""
    disposable: bool = False
    """The conversation left this branch: a regenerated answer, reasoning that the next prompt omits, or a
    second choice. Such states are evicted first, unless they are used."""
    owner: str = ""
    """Conversation for which the state may go to the disk. Empty: it may not."""
    stored: bool = True
    """The state does not have to go to the disk."""
    key: int = 0
    last_use: int = 0


class _LostPrefix(NamedTuple):
    salt: str
    prefix: TokenPrefix
    why: str


class HostCache:
    """Saved states by key, and recently evicted prefixes. Keys are never reused."""

    def __init__(
        self,
        capacity_bytes: int,
        size_bytes: Callable[[int], int],
        serves: Callable[[int, int, int], bool],
    ) -> None:
        """`serves(length, earliest, tokens)` returns whether a state of `length` tokens can be truncated to
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
        """Return the states that a text may continue, most recently used first.

        These are the states whose tokens are a prefix of the text, and the nearest others. Of the states that
        share its longest prefix, at most _NEIGHBOURS on each side are included.
        """
        keys = {*self._index.nearest(salt, ids, _NEIGHBOURS), *self._index.prefixes(salt, ids)}
        return sorted(map(self._state, keys), key=lambda saved: -saved.last_use)

    def _state(self, key: int) -> SavedState:
        if key in self._kept:
            return self._kept[key]
        return self._disposable[key]

    def longest_lost(self, ids: Ids, salt: str) -> tuple[int, str]:
        """Return the length of the longest recently lost prefix of `ids`, and the reason."""
        lengths = (
            (lost.prefix.common_length(ids), lost.why) for lost in self._lost if lost.salt == salt
        )
        return max(lengths, key=lambda pair: pair[0], default=(0, ""))

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

    def has_room(self, tokens: int) -> bool:
        """Return whether a state of this length fits without evicting another one."""
        return self._bytes + self._size_bytes(tokens) <= self._capacity_bytes

    def save(
        self,
        state: SavedState,
        operation: Callable[[int], MemoryOp],
        pinned: SavedState | None = None,
    ) -> list[MemoryOp]:
        """Save a state, unless a saved one serves as well. A state that does not fit is lost.

        Evicts others to make room, but never `pinned`. Returns the discards of the others, and `operation` with
        the key of the state.
        """
        salt = state.salt
        length = len(state.prefix)
        ids = state.prefix.ids
        for saved in map(self._state, islice(self._index.extensions(salt, ids), _NEIGHBOURS)):
            serves = self._serves(len(saved.prefix), saved.earliest, length)
            if serves and saved.exact >= state.exact:
                if not state.disposable:
                    self.touch(saved)
                return []
        older = [
            saved
            for saved in map(self._state, self._index.prefixes(salt, ids))
            if saved is not pinned
            and state.exact >= saved.exact
            and self._serves(length, state.earliest, len(saved.prefix))
        ]
        size = self._size_bytes(length)
        state.prefix = state.prefix.head(length)
        victims = self._victims(size, older, state.disposable, pinned)
        if victims is None:
            why = EVICTED
            if not self._capacity_bytes:
                why = HOST_CACHE_OFF
            elif size > self._capacity_bytes:
                why = TOO_LARGE
            self.record_lost(salt, state.prefix, why)
            return []
        ops: list[MemoryOp] = [self._remove(saved) for saved in (*older, *victims)]
        for saved in victims:
            self.record_lost(saved.salt, saved.prefix, EVICTED)
        self._last_key += 1
        state.key = self._last_key
        state.last_use = self._next_use()
        states = self._disposable if state.disposable else self._kept
        states[state.key] = state
        self._index.add(salt, state.prefix.ids, state.key)
        self._bytes += size
        self.tokens += length
        return [*ops, operation(state.key)]

    def unstored(self) -> Iterator[SavedState]:
        """Return the states that may go to the disk, the least recently used first."""
        return (saved for saved in self._kept.values() if saved.owner and not saved.stored)

    def _victims(
        self, size: int, older: list[SavedState], disposable: bool, pinned: SavedState | None
    ) -> list[SavedState] | None:
        """Return the states to evict, besides `older`, to make `size` bytes fit. None: they can never fit.

        Disposable states go first. A disposable state evicts only other disposable ones.
        """
        short = self._bytes + size - self._capacity_bytes
        short -= sum(self._size_bytes(len(saved.prefix)) for saved in older)
        victims: list[SavedState] = []
        evictable: Iterable[SavedState] = self._disposable.values()
        if not disposable:
            evictable = chain(evictable, self._kept.values())
        for saved in evictable:
            if short <= 0:
                break
            if saved is not pinned and saved not in older:
                victims.append(saved)
                short -= self._size_bytes(len(saved.prefix))
        return victims if short <= 0 else None

    def record_lost(self, salt: str, prefix: TokenPrefix, why: str) -> None:
        """Record a prefix that was lost, for the reason of a later miss."""
        self.evictions += 1
        self._lost.append(_LostPrefix(salt, prefix, why))

    def _remove(self, saved: SavedState) -> Discard:
        states = self._disposable if saved.disposable else self._kept
        del states[saved.key]
        self._index.remove(saved.salt, saved.prefix.ids, saved.key)
        self._bytes -= self._size_bytes(len(saved.prefix))
        self.tokens -= len(saved.prefix)
        return Discard(saved.key)
