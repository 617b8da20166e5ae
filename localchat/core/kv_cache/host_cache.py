"""States of slots saved in RAM beside the cache: bounded in bytes, least recently used first
out."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from localchat.backend_api.interface import Discard, MemoryOp, Save
from localchat.core.kv_cache.token_prefix import Ids, TokenPrefix

_LOST_KEPT = 32

EVICTED = "evicted to make room"
HOST_CACHE_OFF = "dropped for another conversation, as parking in RAM is off"
TOO_LARGE = "dropped for another conversation, as it is larger than the parking memory"


class SavedState:
    """One saved state. `earliest`: lowest position it holds. `spare`: a branch that a conversation
    left behind (an answer begun anew, reasoning that the next turn leaves out, a second choice): it
    is kept only where nothing else wants the room, until it is used."""

    __slots__ = ("earliest", "key", "salt", "spare", "text")

    def __init__(self, key: int, salt: str, text: TokenPrefix, earliest: int, spare: bool) -> None:
        self.key = key
        self.salt = salt
        self.text = text
        self.earliest = earliest
        self.spare = spare


class _LostPrefix(NamedTuple):
    salt: str
    text: TokenPrefix
    why: str


class HostCache:
    """What is parked, under keys that are never used again, and what was lost lately.

    `covers(length, earliest, tokens)`: whether a state of `length` tokens can be cut to `tokens`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        size_bytes: Callable[[int], int],
        covers: Callable[[int, int, int], bool],
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._size_bytes = size_bytes
        self._covers = covers
        self._saved: OrderedDict[int, SavedState] = OrderedDict()
        self._lost: deque[_LostPrefix] = deque(maxlen=_LOST_KEPT)
        self._bytes = 0
        self._last_key = 0
        self.tokens = 0
        self.evictions = 0

    def entries(self, salt: str) -> Iterator[SavedState]:
        """What is saved under a salt, most recently used first."""
        return (saved for saved in reversed(self._saved.values()) if saved.salt == salt)

    def longest_lost(self, ids: Ids, salt: str) -> tuple[int, str]:
        """The longest prefix of `ids` among the texts lost lately, and how it was lost."""
        found = (
            (lost.text.common_length(ids), lost.why) for lost in self._lost if lost.salt == salt
        )
        return max(found, key=lambda pair: pair[0], default=(0, ""))

    def touch(self, saved: SavedState) -> None:
        """It was used now."""
        saved.spare = False
        self._saved.move_to_end(saved.key)

    def next_key(self) -> int:
        """A key never used before."""
        self._last_key += 1
        return self._last_key

    def save(
        self,
        slot: int,
        salt: str,
        text: TokenPrefix,
        earliest: int,
        *,
        spare: bool,
        pinned: SavedState | None,
    ) -> list[MemoryOp]:
        """Save a slot's state, unless something saved serves as well; what does not fit is lost.
        `pinned` is not evicted for it."""
        same = list(self.entries(salt))
        for saved in same:
            if text.common_length(saved.text.ids) == len(text) and self._covers(
                len(saved.text), saved.earliest, len(text)
            ):
                if not spare:
                    self.touch(saved)
                return []
        older = [
            saved
            for saved in same
            if saved is not pinned
            and text.common_length(saved.text.ids) == len(saved.text)
            and self._covers(len(text), earliest, len(saved.text))
        ]
        size = self._size_bytes(len(text))
        kept = text.prefix(len(text))
        victims = self._victims(size, older, spare, pinned)
        if victims is None:
            fits = size <= self._capacity_bytes
            why = EVICTED if fits else TOO_LARGE if self._capacity_bytes else HOST_CACHE_OFF
            self.record_lost(salt, kept, why)
            return []
        ops: list[MemoryOp] = [self._discard(saved) for saved in (*older, *victims)]
        for saved in victims:
            self.record_lost(saved.salt, saved.text, EVICTED)
        key = self.next_key()
        self._saved[key] = SavedState(key, salt, kept, earliest, spare)
        self._bytes += size
        self.tokens += len(kept)
        return [*ops, Save(slot, key)]

    def _victims(
        self, size: int, older: list[SavedState], spare: bool, pinned: SavedState | None
    ) -> list[SavedState] | None:
        """What must go, besides `older`, before `size` bytes fit: spare states first, others only
        for one that is not spare. None: they can never fit."""
        others = [s for s in self._saved.values() if s is not pinned and s not in older]
        order = [s for s in others if s.spare]
        if not spare:
            order += [s for s in others if not s.spare]
        short = self._bytes + size - self._capacity_bytes
        short -= sum(self._size_bytes(len(saved.text)) for saved in older)
        victims: list[SavedState] = []
        for saved in order:
            if short <= 0:
                break
            victims.append(saved)
            short -= self._size_bytes(len(saved.text))
        return victims if short <= 0 else None

    def record_lost(self, salt: str, text: TokenPrefix, why: str) -> None:
        """Remember what cannot be found again, and count it."""
        self.evictions += 1
        self._lost.append(_LostPrefix(salt, text, why))

    def _discard(self, saved: SavedState) -> Discard:
        del self._saved[saved.key]
        self._bytes -= self._size_bytes(len(saved.text))
        self.tokens -= len(saved.text)
        return Discard(saved.key)

    def check(self) -> None:
        """Raises AssertionError naming what is off."""
        sizes = [len(saved.text) for saved in self._saved.values()]
        assert self.tokens == sum(sizes), "parked tokens are off"
        assert self._bytes == sum(map(self._size_bytes, sizes)), "parked bytes are off"
        assert self._bytes <= self._capacity_bytes, "more is parked than there is room for"
        assert all(key == saved.key for key, saved in self._saved.items()), "a key is off"
