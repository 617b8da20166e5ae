"""KV cache of slots in one unified cache (the llama.cpp runner).

A conversation is *running*, *idle* (still in its slot, while nothing else runs), or *swapped* to RAM. At most
one is idle, and none while another runs. Every step reads every cell in the cache, so 6,144 idle tokens slow
the others by 20 %, while saving and restoring 1,536 tokens takes 3 ms. The next turn of an idle conversation
continues in place. A new conversation shares its common prefix with a running one without a copy.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from localchat.backend_api.interface import (
    Alias,
    Capabilities,
    Drop,
    Import,
    MemoryOp,
    Restore,
    Save,
    StateRange,
    Truncate,
)
from localchat.core.kv_cache.host_cache import HostCache, SavedState
from localchat.core.kv_cache.manager import (
    CacheUpdate,
    KVCacheManager,
    KVUsage,
    PrefixHit,
    ValidTokens,
)
from localchat.core.kv_cache.slot_cells import Cells
from localchat.core.kv_cache.token_prefix import Ids, TokenPrefix

MIN_SWAP_TOKENS = 32
"""Shorter prefixes are computed again, because saving them takes longer."""
RESTORED_PER_COMPUTED = 50
"""Restoring this many tokens costs about as much as computing one. Restoring takes 2 µs per token, and
computing takes 4 ms on two cores or 0.1 ms on a GPU. A short prefix of a long saved state is computed again."""

_EXACT_CHUNKS = "a request with a seed or at temperature 0 reuses whole chunks of its own kind"


@dataclass(slots=True, eq=False)
class _SlotEntry:
    """Tokens computed in a slot. The slot may hold more cells."""

    slot: int
    salt: str
    prefix: TokenPrefix
    earliest: int
    """Lowest position in the slot, as measured in step `seen`."""
    seen: int = 0
    exact: int = 0
    """Leading tokens whose KV has the bits of a fresh computation."""
    compact: bool = False
    """True if the slot was filled in an empty cache: its cells are the first ones."""
    disposable: bool = False
    owner: str = ""
    stored: bool = False
    """See SavedState."""
    rewind_slot: int = -1
    """Slot with the state of `prefix` while drafts are verified. -1: none."""


_NOTHING = CacheUpdate()


class UnstoredText(NamedTuple):
    """A text whose KV is in memory and not yet on the disk."""

    ids: Ids
    salt: str
    owner: str
    earliest: int
    exact: int
    """Leading tokens whose KV has the bits of a fresh computation."""
    holder: "_SlotEntry | SavedState"

    @property
    def slot(self) -> int | None:
        """Slot that holds the text. None: host memory does."""
        if isinstance(self.holder, _SlotEntry):
            return self.holder.slot
        return None

    @property
    def key(self) -> int:
        """Key of the state in host memory."""
        assert isinstance(self.holder, SavedState)
        return self.holder.key

    def mark_stored(self) -> None:
        """Record that nothing of the text has to go to the disk."""
        self.holder.stored = True


class _SlotPrefix(NamedTuple):
    version: int
    entry: _SlotEntry | SavedState | None


class SlotKVCacheManager(KVCacheManager):
    """See KVCacheManager."""

    def __init__(
        self,
        capabilities: Capabilities,
        cache_ram_bytes: int,
        *,
        min_swap_tokens: int = MIN_SWAP_TOKENS,
    ) -> None:
        """`cache_ram_bytes` bounds the host cache. 0 turns it off.

        `capabilities.max_slots` and `kv_tokens` do not count a runner's scratch slot and its cells. Entries
        shorter than `min_swap_tokens` are dropped instead of saved.
        """
        self._can = capabilities
        self._cells = Cells(capabilities.kv_tokens)
        self._slots = list(range(capabilities.max_slots))
        self._running: dict[int, _SlotEntry] = {}
        self._idle: _SlotEntry | None = None
        """Conversation that stays in its slot while nothing runs."""
        self._host_cache = HostCache(cache_ram_bytes, self._saved_bytes, self.can_truncate)
        self._min_swap_tokens = min_swap_tokens
        self._version = 0
        self._steps = 0
        self._committing = False

    def _saved_bytes(self, tokens: int) -> int:
        return self._can.bytes_per_token * tokens + self._can.state_bytes

    def can_truncate(self, length: int, earliest: int, tokens: int) -> bool:
        """Return whether a state of `length` tokens from position `earliest` can be truncated to `tokens`."""
        if tokens == length or self._can.rewind == "any":
            return True
        return self._can.rewind == "last_n" and earliest <= max(0, tokens - self._can.rewind_tokens)

    def _guaranteed_from(self, length: int, earliest: int) -> int:
        """Return the lowest position that a state of `length` tokens is guaranteed to hold.

        A saved state has only its window, and other slots may overwrite the cells before an entry's window.
        """
        if self._can.rewind != "last_n":
            return earliest
        return max(earliest, length - self._can.rewind_tokens)

    def _earliest(self, entry: _SlotEntry) -> int:
        """Return the lowest position that an entry holds.

        Measured by the last step, or an upper bound if that step had no row of the entry.
        """
        if entry.seen == self._steps:
            return entry.earliest
        return self._guaranteed_from(len(entry.prefix), entry.earliest)

    def find_prefix(self, tokens: Sequence[int], salt: str, exact_chunk: int = 0) -> PrefixHit:
        self._committing = False
        ids = np.asarray(tokens, np.int32)[:-1]
        best = 0
        source = None
        longest_unusable = 0
        reason = ""
        differs = False
        for entry in self._candidates(ids, salt):
            shared = entry.prefix.common_length(ids)
            if exact_chunk:
                exact = min(shared, entry.exact) // exact_chunk * exact_chunk
                if shared > max(exact, longest_unusable):
                    longest_unusable = shared
                    reason = _EXACT_CHUNKS
                shared = exact
            unusable = self._unusable_reason(entry, shared)
            if unusable is None and shared > best:
                best = shared
                source = entry
                differs = False
            elif unusable is not None and shared > longest_unusable:
                longest_unusable = shared
                reason = unusable
            if shared == best and shared < len(entry.prefix):
                differs = True
        return PrefixHit(
            best,
            self._miss_reason(ids, salt, best, longest_unusable, reason, differs),
            _SlotPrefix(self._version, source),
        )

    def _candidates(self, ids: Ids, salt: str) -> Iterator[_SlotEntry | SavedState]:
        """Yield the entries of a salt, cheapest to use first. The first wins a tie."""
        if self._idle is not None and self._idle.salt == salt:
            yield self._idle
        yield from (entry for entry in self._running.values() if entry.salt == salt)
        yield from self._host_cache.candidates(ids, salt)

    def _unusable_reason(self, entry: _SlotEntry | SavedState, shared: int) -> str | None:
        """Return why the first `shared` tokens of an entry cannot be used. None: they can."""
        length = len(entry.prefix)
        running = isinstance(entry, _SlotEntry) and entry is not self._idle
        if self._can.rewind == "checkpoint" and (running or shared < length):
            return "this model cannot rewind"
        earliest = self._earliest(entry) if isinstance(entry, _SlotEntry) else entry.earliest
        if not self.can_truncate(length, earliest, shared):
            return "this model's sliding window has moved on"
        if isinstance(entry, SavedState):
            if shared * RESTORED_PER_COMPUTED < length:
                return ""
            if max(length, shared + 1) > self._free():
                return "no room now to restore it"
        return None

    def _miss_reason(
        self, ids: Ids, salt: str, best: int, longest_unusable: int, reason: str, differs: bool
    ) -> str:
        """Return why more than `best` tokens of `ids` are not reused. Empty: nothing more was cached.

        reason: why `longest_unusable` tokens cannot be used. differs: the best entry goes on with other tokens.
        """
        if best == len(ids):
            return ""
        lost, how = self._host_cache.longest_lost(ids, salt)
        if lost > max(best, longest_unusable):
            return how
        if longest_unusable > best and reason:
            if longest_unusable == len(ids):
                return reason
            return f"the text differs from token {longest_unusable + 1} on, and {reason}"
        if best and differs:
            return f"the text differs from token {best + 1} on"
        return ""

    def _free(self) -> int:
        """Return the cells that are free once the idle entry is evicted."""
        if self._idle is None:
            return self._cells.free
        return self._cells.free + self._cells.used_by(self._idle.slot)

    def allocate(
        self, seq: int, tokens: Sequence[int], hit: PrefixHit, salt: str, owner: str = ""
    ) -> CacheUpdate | None:
        assert seq not in self._running, f"sequence {seq} is already allocated"
        assert isinstance(hit.source, _SlotPrefix)
        assert hit.source.version == self._version, "the hit is older than the last change"
        source = hit.source.entry
        if not self._slots and self._idle is None:
            return None
        if self._free() < self._cells_wanted(source, hit.cached):
            return None
        ops: list[MemoryOp] = []
        idle = self._idle
        self._idle = None
        if idle is not None and idle.owner == owner:
            # The sequence replaces a text that it continues.
            shared = idle.prefix.common_length(np.asarray(tokens, np.int32))
            idle.disposable |= shared == len(idle.prefix)
        if idle is not None and idle is source:
            entry = idle
            ops += self._rewind_idle(idle, hit.cached, owner)
        else:
            if idle is not None:
                ops += self._evict_to_host(idle, source if isinstance(source, SavedState) else None)
            entry = self._new_entry(source, hit.cached, salt)
            ops += self._load_prefix(entry.slot, source, hit.cached)
        self._cells.extend(entry.slot, 1)
        entry.owner = owner
        entry.stored = False
        self._running[seq] = entry
        self._version += 1
        return CacheUpdate(tuple(ops))

    def _rewind_idle(self, idle: _SlotEntry, cached: int, owner: str) -> list[MemoryOp]:
        """Truncate the idle entry to its first `cached` tokens. Save it first if that loses many tokens."""
        ops: list[MemoryOp] = []
        lost = len(idle.prefix) - cached
        if lost and lost >= self._min_swap_tokens:
            # With less in common, it is another conversation with the same start.
            same = idle.disposable or 2 * cached >= len(idle.prefix)
            idle.disposable = idle.owner == owner and same
            ops += self._swap_out(idle, None)
        if lost:
            ops += self._truncate(idle, cached)
            idle.prefix = idle.prefix.head(cached)
            idle.exact = min(idle.exact, cached)
        idle.disposable = False
        return ops

    def _new_entry(
        self, source: _SlotEntry | SavedState | None, cached: int, salt: str
    ) -> _SlotEntry:
        """Return an entry in a free slot, whose first `cached` tokens come from `source`."""
        slot = heapq.heappop(self._slots)
        if source is None:
            entry = _SlotEntry(slot, salt, TokenPrefix(np.empty(0, np.int32)), 0)
        else:
            earliest = source.earliest
            if isinstance(source, _SlotEntry):
                earliest = self._guaranteed_from(cached, self._earliest(source))
            entry = _SlotEntry(slot, salt, source.prefix.head(cached), earliest)
            entry.exact = min(source.exact, cached)
        entry.seen = self._steps
        entry.compact = not self._running
        return entry

    def _cells_wanted(self, source: _SlotEntry | SavedState | None, cached: int) -> int:
        """Return the free cells that an allocation needs.

        A state is restored in full before it is truncated. `find_prefix` offers only states with room for that.
        """
        shared = isinstance(source, _SlotEntry) and source is not self._idle
        if source is None or shared:
            return 1
        return cached + 1

    def _load_prefix(
        self, slot: int, source: _SlotEntry | SavedState | None, cached: int
    ) -> list[MemoryOp]:
        if source is None:
            return []
        if isinstance(source, SavedState):
            self._host_cache.touch(source)
            self._cells.extend(slot, cached)
            return [Restore(source.key, slot, cached)]
        self._cells.share(source.slot, slot, cached)
        return [Alias(source.slot, slot, cached)]

    def slot(self, seq: int) -> int:
        return self._running[seq].slot

    def extend(self, seq: int, tokens: int) -> CacheUpdate | None:
        self._committing = False
        slot = self._running[seq].slot
        missing = tokens - self._cells.used_by(slot)
        if missing > self._cells.free:
            return None
        if missing > 0:
            self._cells.extend(slot, missing)
            self._version += 1
        return _NOTHING

    def commit(self, seq: int, tokens: Sequence[int], valid: ValidTokens) -> CacheUpdate:
        entry = self._running[seq]
        before = len(entry.prefix)
        computed = valid.computed
        assert before <= computed <= self._cells.used_by(entry.slot), (
            f"sequence {seq}: {computed} tokens computed, {before} were before"
        )
        if entry.rewind_slot >= 0 and computed < self._cells.used_by(entry.slot):
            return self._return_to_held(entry)
        dropped = tuple(self._drop_held(entry))
        self._version += 1
        if not self._committing:
            # The commits of one step follow each other.
            self._committing = True
            self._steps += 1
        entry.prefix.append(tokens[before:computed])
        entry.exact = max(entry.exact, valid.exact)
        entry.earliest = valid.earliest
        entry.seen = self._steps
        if self._cells.used_by(entry.slot) == computed + valid.ahead:
            return CacheUpdate(dropped)
        if self._can.rewind == "last_n" and not self.can_truncate(
            computed + 1, valid.earliest, computed
        ):
            self._cells.truncate(entry.slot, 0)
            entry.prefix = TokenPrefix(np.empty(0, np.int32))
            entry.earliest = 0
            entry.exact = 0
            return CacheUpdate((Drop(entry.slot),), kept=0)
        return CacheUpdate(tuple(self._truncate(entry, computed + valid.ahead)))

    def hold_state(self, seq: int) -> CacheUpdate | None:
        if self._can.rewind != "checkpoint":
            return _NOTHING
        entry = self._running[seq]
        if entry.rewind_slot >= 0:
            # The last step computed nothing, so the state is still held.
            return _NOTHING
        held_states = sum(other.rewind_slot >= 0 for other in self._running.values())
        # The other slots are for the rows.
        spare = self._can.max_slots - self._can.max_rows - held_states
        if spare <= 0 or not self._slots or not entry.prefix:
            return None
        entry.rewind_slot = heapq.heappop(self._slots)
        self._cells.share(entry.slot, entry.rewind_slot, len(entry.prefix))
        self._version += 1
        return CacheUpdate((Alias(entry.slot, entry.rewind_slot, len(entry.prefix)),))

    def _return_to_held(self, entry: _SlotEntry) -> CacheUpdate:
        """Restore the state that a slot had before its drafts."""
        kept = len(entry.prefix)
        self._cells.truncate(entry.slot, 0)
        self._cells.share(entry.rewind_slot, entry.slot, kept)
        self._version += 1
        back = (Drop(entry.slot), Alias(entry.rewind_slot, entry.slot, kept))
        return CacheUpdate((*back, *self._drop_held(entry)), kept=kept)

    def _drop_held(self, entry: _SlotEntry) -> list[MemoryOp]:
        if entry.rewind_slot < 0:
            return []
        slot = entry.rewind_slot
        entry.rewind_slot = -1
        self._cells.truncate(slot, 0)
        heapq.heappush(self._slots, slot)
        return [Drop(slot)]

    def _truncate(self, entry: _SlotEntry, tokens: int) -> list[MemoryOp]:
        """Truncate a slot to `tokens`. A model that cannot rewind never has too many."""
        self._cells.truncate(entry.slot, tokens)
        if not tokens:
            return [Drop(entry.slot)]
        if self._can.rewind == "checkpoint":
            return []
        return [Truncate(entry.slot, tokens)]

    def checkpoint(self, seq: int) -> CacheUpdate:
        if self._can.rewind != "checkpoint":
            return CacheUpdate()
        self._version += 1
        return CacheUpdate(tuple(self._swap_out(self._running[seq], None)))

    def fork(self, seq: int, child: int) -> CacheUpdate | None:
        assert child not in self._running, f"sequence {child} is already allocated"
        entry = self._running[seq]
        committed = len(entry.prefix)
        if not self._slots or not self._cells.free:
            return None
        slot = heapq.heappop(self._slots)
        ops: tuple[MemoryOp, ...] = ()
        if committed:
            self._cells.share(entry.slot, slot, committed)
            ops = (Alias(entry.slot, slot, committed),)
        self._cells.extend(slot, 1)
        prefix = entry.prefix.head(committed)
        earliest = self._guaranteed_from(committed, entry.earliest)
        self._running[child] = _SlotEntry(slot, entry.salt, prefix, earliest, disposable=True)
        self._running[child].seen = entry.seen
        self._running[child].exact = min(entry.exact, committed)
        self._version += 1
        return CacheUpdate(ops)

    def release(self, seq: int, *, keep: bool) -> CacheUpdate:
        entry = self._running.pop(seq)
        entry.earliest = self._earliest(entry)
        entry.seen = self._steps
        self._version += 1
        ops = self._drop_held(entry)
        if not keep or not entry.prefix:
            return CacheUpdate((*ops, *self._drop(entry)))
        if self._cells.used_by(entry.slot) > len(entry.prefix):
            ops += self._truncate(entry, len(entry.prefix))
        if self._running:
            ops += self._evict_to_host(entry, None)
        else:
            if not entry.compact:
                # Cells at other positions change the order of sums in attention.
                entry.exact = 0
            self._idle = entry
        return CacheUpdate(tuple(ops))

    def _evict_to_host(self, entry: _SlotEntry, pinned: SavedState | None) -> list[MemoryOp]:
        return [*self._swap_out(entry, pinned), *self._drop(entry)]

    def evict_idle(self) -> tuple[MemoryOp, ...]:
        """Move the idle conversation to RAM. Return no operations if it stays, because RAM has no room."""
        idle = self._idle
        if idle is None or not self._host_cache.has_room(len(idle.prefix)):
            return ()
        self._idle = None
        self._version += 1
        return tuple(self._evict_to_host(idle, None))

    def _swap_out(self, entry: _SlotEntry, pinned: SavedState | None) -> list[MemoryOp]:
        if len(entry.prefix) < self._min_swap_tokens:
            return []
        state = SavedState(
            entry.salt,
            entry.prefix,
            self._guaranteed_from(len(entry.prefix), entry.earliest),
            entry.exact,
            entry.disposable,
            entry.owner,
            entry.stored,
        )
        return self._host_cache.save(state, partial(Save, entry.slot), pinned)

    def _drop(self, entry: _SlotEntry) -> list[MemoryOp]:
        self._cells.truncate(entry.slot, 0)
        heapq.heappush(self._slots, entry.slot)
        return [Drop(entry.slot)]

    def adopt(
        self, ids: Ids, salt: str, earliest: int, ranges: tuple[StateRange, ...], exact: int = 0
    ) -> CacheUpdate:
        """Save a state that was loaded from the disk in RAM, if there is room."""
        self._version += 1
        state = SavedState(salt, TokenPrefix(ids.copy()), earliest, exact)
        return CacheUpdate(tuple(self._host_cache.save(state, partial(Import, ranges=ranges))))

    def unstored(self) -> Iterator[UnstoredText]:
        """Yield the texts that still have to go to the disk. Only while nothing runs."""
        idle = self._idle
        if idle is not None and idle.owner and not idle.stored:
            earliest = self._guaranteed_from(len(idle.prefix), self._earliest(idle))
            yield UnstoredText(idle.prefix.ids, idle.salt, idle.owner, earliest, idle.exact, idle)
        for saved in list(self._host_cache.unstored()):
            yield UnstoredText(
                saved.prefix.ids, saved.salt, saved.owner, saved.earliest, saved.exact, saved
            )

    def usage(self) -> KVUsage:
        cached = self._cells.used_by(self._idle.slot) if self._idle else 0
        return KVUsage(
            live=self._cells.total - self._cells.free - cached,
            shared=self._cells.shared,
            cached=cached,
            swapped=self._host_cache.tokens,
            free=self._cells.free,
            total=self._cells.total,
            evictions=self._host_cache.evictions,
        )

    def never_fits(self, tokens: int) -> bool:
        return tokens > min(self._can.kv_tokens, self._can.context_tokens)
