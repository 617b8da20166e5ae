"""States of slots saved in RAM beside the cache: bounded in bytes, least recently used first
out."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from localchat.loop.backend import Discard, MemoryOp, Park
from localchat.loop.kv.text import Ids, Text

_LOST_KEPT = 32

EVICTED = "evicted to make room"
NO_PARKING = "dropped for another conversation, as parking in RAM is off"
TOO_LARGE = "dropped for another conversation, as it is larger than the parking memory"


class Saved(NamedTuple):
    """One saved state. `earliest`: lowest position it holds."""

    key: int
    salt: str
    text: Text
    earliest: int


class _Lost(NamedTuple):
    salt: str
    text: Text
    why: str


class Parking:
    """What is parked, under keys that are never used again, and what was lost lately.

    `covers(length, earliest, tokens)`: whether a state of `length` tokens can be cut to `tokens`.
    """

    def __init__(
        self,
        room_bytes: int,
        size_bytes: Callable[[int], int],
        covers: Callable[[int, int, int], bool],
    ) -> None:
        self._room_bytes = room_bytes
        self._size_bytes = size_bytes
        self._covers = covers
        self._saved: OrderedDict[int, Saved] = OrderedDict()
        self._lost: deque[_Lost] = deque(maxlen=_LOST_KEPT)
        self._bytes = 0
        self._last_key = 0
        self.tokens = 0
        self.evictions = 0

    def of(self, salt: str) -> Iterator[Saved]:
        """What is saved under a salt, most recently used first."""
        return (saved for saved in reversed(self._saved.values()) if saved.salt == salt)

    def lost(self, ids: Ids, salt: str) -> tuple[int, str]:
        """The longest prefix of `ids` among the texts lost lately, and how it was lost."""
        found = ((lost.text.common(ids), lost.why) for lost in self._lost if lost.salt == salt)
        return max(found, key=lambda pair: pair[0], default=(0, ""))

    def touch(self, saved: Saved) -> None:
        """It was used now."""
        self._saved.move_to_end(saved.key)

    def next_key(self) -> int:
        """A key never used before."""
        self._last_key += 1
        return self._last_key

    def save(
        self, slot: int, salt: str, text: Text, earliest: int, pinned: Saved | None
    ) -> list[MemoryOp]:
        """Park a slot's state, unless something saved serves as well; what does not fit is lost.
        `pinned` is not evicted for it."""
        same = list(self.of(salt))
        for saved in same:
            if text.common(saved.text.ids) == len(text) and self._covers(
                len(saved.text), saved.earliest, len(text)
            ):
                self.touch(saved)
                return []
        size = self._size_bytes(len(text))
        pinned_bytes = self._size_bytes(len(pinned.text)) if pinned else 0
        if size + pinned_bytes > self._room_bytes:
            fits = size <= self._room_bytes
            self.lose(
                salt, text, EVICTED if fits else TOO_LARGE if self._room_bytes else NO_PARKING
            )
            return []
        ops: list[MemoryOp] = []
        for saved in same:
            prefix = len(saved.text)
            if (
                saved is not pinned
                and text.common(saved.text.ids) == prefix
                and self._covers(len(text), earliest, prefix)
            ):
                ops.append(self._discard(saved))
        while self._bytes + size > self._room_bytes:
            oldest = next(saved for saved in self._saved.values() if saved is not pinned)
            ops.append(self._discard(oldest))
            self.lose(oldest.salt, oldest.text, EVICTED)
        saved = Saved(self.next_key(), salt, text.first(len(text)), earliest)
        self._saved[saved.key] = saved
        self._bytes += size
        self.tokens += len(text)
        return [*ops, Park(slot, saved.key)]

    def lose(self, salt: str, text: Text, why: str) -> None:
        """Remember what cannot be found again, and count it."""
        self.evictions += 1
        self._lost.append(_Lost(salt, text, why))

    def _discard(self, saved: Saved) -> Discard:
        del self._saved[saved.key]
        self._bytes -= self._size_bytes(len(saved.text))
        self.tokens -= len(saved.text)
        return Discard(saved.key)

    def check(self) -> None:
        """Raises AssertionError naming what is off."""
        sizes = [len(saved.text) for saved in self._saved.values()]
        assert self.tokens == sum(sizes), "parked tokens are off"
        assert self._bytes == sum(map(self._size_bytes, sizes)), "parked bytes are off"
        assert self._bytes <= self._room_bytes, "more is parked than there is room for"
        assert all(key == saved.key for key, saved in self._saved.items()), "a key is off"
