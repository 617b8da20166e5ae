"""The KV books of one unified cache with slots (the llama.cpp runner).

A text is *running*, *idle* (its slot keeps it, and nothing else runs), or *parked* in RAM. There is
at most one idle text, and none while something runs: every cell in the cache is read by every step,
whoever it belongs to (6,144 idle tokens cost the others 20 %), while parking and restoring 1,536
tokens takes 3 ms. The next turn of an idle conversation goes on in place; what a running text has
in common with a new one is shared without a copy. The idea of host-memory prompt caching is
llama-server's.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from localchat.backend_api.interface import (
    Alias,
    Capabilities,
    Discard,
    Drop,
    MemoryOp,
    Restore,
    Save,
    Truncate,
)
from localchat.core.kv_cache.host_cache import HostCache, SavedState
from localchat.core.kv_cache.manager import CacheUpdate, KVUsage, PrefixHit
from localchat.core.kv_cache.slot_cells import Cells
from localchat.core.kv_cache.token_prefix import Ids, TokenPrefix

WORTH_PARKING_TOKENS = 32
"""Computing fewer again takes less than the attention that parking asks of everyone."""
RESTORED_PER_COMPUTED = 50
"""Restoring so many tokens costs about what computing one does (2 µs against 4 ms on two cores; 0.1
ms on a GPU): a short prefix of a long parked text is computed anew."""


class _Held:
    """A text in a slot: `text` is computed there; the cells of the slot may be more (room).
    `earliest` was measured in step `seen` of the books. `spare`: see `SavedState`."""

    __slots__ = ("earliest", "salt", "seen", "slot", "spare", "text")

    def __init__(
        self, slot: int, salt: str, text: TokenPrefix, earliest: int, *, spare: bool = False
    ) -> None:
        self.slot = slot
        self.salt = salt
        self.text = text
        self.earliest = earliest
        self.seen = 0
        self.spare = spare


class _Source(NamedTuple):
    version: int
    found: _Held | SavedState | None


class SlotKVCacheManager:
    """See `Book`. `capabilities.max_slots` and `kv_tokens` are what sequences may use (a runner's
    scratch slot and its cells not counted). `cache_ram_bytes` bounds what is parked, 0: nothing is.
    `worth_parking`: shorter texts are dropped instead."""

    def __init__(
        self,
        capabilities: Capabilities,
        cache_ram_bytes: int,
        *,
        worth_parking: int = WORTH_PARKING_TOKENS,
    ) -> None:
        self._can = capabilities
        self._cells = Cells(capabilities.kv_tokens)
        self._slots = list(range(capabilities.max_slots))
        self._running: dict[int, _Held] = {}
        self._idle: _Held | None = None
        self._parking = HostCache(cache_ram_bytes, self._parked_bytes, self._can_cut)
        self._worth_parking = worth_parking
        self._version = 0
        self._steps = 0
        self._settling = False

    def _parked_bytes(self, tokens: int) -> int:
        return self._can.bytes_per_token * tokens + self._can.state_bytes

    def _can_cut(self, length: int, earliest: int, tokens: int) -> bool:
        """Whether a state of `length` tokens that holds positions from `earliest` on can be cut to
        `tokens`."""
        if tokens == length or self._can.rewind == "any":
            return True
        return self._can.rewind == "last_n" and earliest <= max(0, tokens - self._can.rewind_tokens)

    def _kept_from(self, length: int, earliest: int) -> int:
        """The earliest position that a state of `length` tokens holds for sure. A saved state has its window
        alone, and of a text in a slot any other may write over the cells behind the window."""
        if self._can.rewind != "last_n":
            return earliest
        return max(earliest, length - self._can.rewind_tokens)

    def _earliest(self, held: _Held) -> int:
        """As measured by the last step, or from above where the last step was not its own."""
        if held.seen == self._steps:
            return held.earliest
        return self._kept_from(len(held.text), held.earliest)

    # ------------------------------------------------------------------------ the prefix

    def match(self, tokens: Sequence[int], salt: str) -> PrefixHit:
        self._settling = False
        ids = np.asarray(tokens, np.int32)[:-1]
        best, source = 0, None
        known, reason = 0, ""
        differs = False
        for found in self._candidates(salt):
            shared = found.text.common(ids)
            why = self._why_unusable(found, shared)
            if why is None and shared > best:
                best, source, differs = shared, found, False
            elif why is not None and shared > known:
                known, reason = shared, why
            if shared == best and shared < len(found.text):
                differs = True
        return PrefixHit(
            best,
            self._why_missed(ids, salt, best, known, reason, differs),
            _Source(self._version, source),
        )

    def _candidates(self, salt: str) -> Iterator[_Held | SavedState]:
        """Cheapest to use first: on a tie the first is taken."""
        if self._idle is not None and self._idle.salt == salt:
            yield self._idle
        yield from (held for held in self._running.values() if held.salt == salt)
        yield from self._parking.of(salt)

    def _why_unusable(self, found: _Held | SavedState, shared: int) -> str | None:
        """Why the first `shared` tokens of a text cannot be used; None: they can."""
        length = len(found.text)
        running = isinstance(found, _Held) and found is not self._idle
        if running and not self._can.share:
            return "this model cannot share a text that is being worked on"
        if self._can.rewind == "checkpoint" and (running or shared < length):
            return "this model cannot rewind"
        earliest = self._earliest(found) if isinstance(found, _Held) else found.earliest
        if not self._can_cut(length, earliest, shared):
            return "this model's sliding window has moved on"
        if isinstance(found, SavedState):
            if shared * RESTORED_PER_COMPUTED < length:
                return ""
            if max(length, shared + 1) > self._free():
                return "no room now to restore it"
        return None

    def _why_missed(
        self, ids: Ids, salt: str, best: int, known: int, reason: str, differs: bool
    ) -> str:
        if best == len(ids):
            return ""
        lost, how = self._parking.lost(ids, salt)
        if lost > max(best, known):
            return how
        if known > best and reason:
            at = f"the text differs from token {known + 1} on, and " if known < len(ids) else ""
            return at + reason
        return f"the text differs from token {best + 1} on" if best and differs else ""

    def _free(self) -> int:
        """Cells free once the idle text is out of the way."""
        return self._cells.free + (self._cells.held(self._idle.slot) if self._idle else 0)

    def admit(
        self, seq: int, tokens: Sequence[int], hit: PrefixHit, salt: str
    ) -> CacheUpdate | None:
        assert seq not in self._running, f"sequence {seq} is admitted already"
        assert isinstance(hit.source, _Source)
        assert hit.source.version == self._version, "the hit is older than the last change"
        found, cached = hit.source.found, hit.cached
        if not self._slots and self._idle is None:
            return None
        if self._free() < self._cells_wanted(found, cached):
            return None
        ops: list[MemoryOp] = []
        idle, self._idle = self._idle, None
        if idle is not None and idle is found:
            held = idle
            if cached < len(idle.text):
                if len(idle.text) - cached >= self._worth_parking:
                    idle.spare = True
                    ops += self._park(idle, None)
                ops += self._cut(idle, cached)
                idle.text = idle.text.first(cached)
            idle.spare = False
        else:
            if idle is not None:
                ops += self._put_away(idle, found if isinstance(found, SavedState) else None)
            text = found.text.first(cached) if found else TokenPrefix(np.empty(0, np.int32))
            earliest = found.earliest if found else 0
            if isinstance(found, _Held):
                earliest = self._earliest(found)
            held = _Held(heapq.heappop(self._slots), salt, text, earliest)
            held.seen = self._steps
            ops += self._fill(held.slot, found, cached)
        self._cells.extend(held.slot, 1)
        self._running[seq] = held
        self._version += 1
        return CacheUpdate(tuple(ops))

    def _cells_wanted(self, found: _Held | SavedState | None, cached: int) -> int:
        """Free cells that an admission keeps. (A restored state is whole before it is cut: `match`
        offers none that has no room for that.)"""
        shared = isinstance(found, _Held) and found is not self._idle
        return 1 if found is None or shared else cached + 1

    def _fill(self, slot: int, found: _Held | SavedState | None, cached: int) -> list[MemoryOp]:
        if found is None:
            return []
        if isinstance(found, SavedState):
            self._parking.touch(found)
            self._cells.extend(slot, cached)
            return [Restore(found.key, slot, cached)]
        self._cells.share(found.slot, slot, cached)
        return [Alias(found.slot, slot, cached)]

    # ------------------------------------------------------------------------ running

    def slot(self, seq: int) -> int:
        return self._running[seq].slot

    def grow(self, seq: int, tokens: int) -> CacheUpdate | None:
        self._settling = False
        slot = self._running[seq].slot
        missing = tokens - self._cells.held(slot)
        if missing > self._cells.free:
            return None
        if missing > 0:
            self._cells.extend(slot, missing)
            self._version += 1
        return CacheUpdate()

    def settle(
        self, seq: int, tokens: Sequence[int], computed: int, earliest: int = 0
    ) -> CacheUpdate:
        held = self._running[seq]
        before = len(held.text)
        assert before <= computed <= self._cells.held(held.slot), (
            f"sequence {seq}: {computed} tokens computed, {before} were before"
        )
        self._version += 1
        if not self._settling:  # all that a step computed is settled in a row
            self._settling = True
            self._steps += 1
        held.text.append(tokens[before:computed])
        held.earliest, held.seen = earliest, self._steps
        if self._cells.held(held.slot) == computed:
            return CacheUpdate()
        if self._can.rewind == "last_n" and not self._can_cut(computed + 1, earliest, computed):
            self._cells.truncate(held.slot, 0)
            held.text, held.earliest = TokenPrefix(np.empty(0, np.int32)), 0
            return CacheUpdate((Drop(held.slot),), lost=True)
        return CacheUpdate(tuple(self._cut(held, computed)))

    def _cut(self, held: _Held, tokens: int) -> list[MemoryOp]:
        """Leave a slot `tokens` tokens. A model that cannot rewind never has more than it
        should."""
        self._cells.truncate(held.slot, tokens)
        if not tokens:
            return [Drop(held.slot)]
        return [] if self._can.rewind == "checkpoint" else [Truncate(held.slot, tokens)]

    def checkpoint(self, seq: int) -> CacheUpdate:
        if self._can.rewind != "checkpoint":
            return CacheUpdate()
        self._version += 1
        return CacheUpdate(tuple(self._park(self._running[seq], None)))

    def fork(self, seq: int, child: int) -> CacheUpdate | None:
        assert child not in self._running, f"sequence {child} is admitted already"
        held = self._running[seq]
        settled = len(held.text)
        if not self._slots or self._cells.free < (1 if self._can.share else settled + 1):
            return None
        slot = heapq.heappop(self._slots)
        ops: tuple[MemoryOp, ...] = ()
        if settled and self._can.share:
            self._cells.share(held.slot, slot, settled)
            ops = (Alias(held.slot, slot, settled),)
        elif settled:
            self._cells.extend(slot, settled)
            key = self._parking.next_key()
            ops = (Save(held.slot, key), Restore(key, slot, settled), Discard(key))
        self._cells.extend(slot, 1)
        text = held.text.first(settled)
        self._running[child] = _Held(slot, held.salt, text, held.earliest, spare=True)
        self._running[child].seen = held.seen
        self._version += 1
        return CacheUpdate(ops)

    def release(self, seq: int, *, keep: bool) -> CacheUpdate:
        held = self._running.pop(seq)
        held.earliest, held.seen = self._earliest(held), self._steps
        self._version += 1
        ops: list[MemoryOp] = []
        if not keep or not held.text:
            return CacheUpdate(tuple(self._drop(held)))
        if self._cells.held(held.slot) > len(held.text):
            ops += self._cut(held, len(held.text))
        if self._running:
            ops += self._put_away(held, None)
        else:
            self._idle = held
        return CacheUpdate(tuple(ops))

    # ------------------------------------------------------------------------ idle texts

    def _put_away(self, held: _Held, pinned: SavedState | None) -> list[MemoryOp]:
        return [*self._park(held, pinned), *self._drop(held)]

    def _park(self, held: _Held, pinned: SavedState | None) -> list[MemoryOp]:
        if len(held.text) < self._worth_parking:
            return []
        earliest = self._kept_from(len(held.text), held.earliest)
        return self._parking.save(
            held.slot, held.salt, held.text, earliest, spare=held.spare, pinned=pinned
        )

    def _drop(self, held: _Held) -> list[MemoryOp]:
        self._cells.truncate(held.slot, 0)
        heapq.heappush(self._slots, held.slot)
        return [Drop(held.slot)]

    # ------------------------------------------------------------------------ figures

    def usage(self) -> KVUsage:
        cached = self._cells.held(self._idle.slot) if self._idle else 0
        return KVUsage(
            live=self._cells.total - self._cells.free - cached,
            shared=self._cells.shared(),
            cached=cached,
            parked=self._parking.tokens,
            free=self._cells.free,
            total=self._cells.total,
            evictions=self._parking.evictions,
        )

    def never_fits(self, tokens: int) -> bool:
        return tokens > min(self._can.kv_tokens, self._can.context_tokens)

    def check(self) -> None:
        self._cells.check()
        self._parking.check()
        assert not (self._idle and self._running), "an idle text lies beside running ones"
        holders = [*self._running.values(), *([self._idle] if self._idle else [])]
        slots = [*self._slots, *(held.slot for held in holders)]
        assert sorted(slots) == list(range(self._can.max_slots)), "a slot is lost or held twice"
        assert not any(self._cells.held(slot) for slot in self._slots), "an empty slot holds cells"
        for held in holders:
            cells = self._cells.held(held.slot)
            assert len(held.text) <= cells, f"slot {held.slot}: more text than cells"
            assert self._can.rewind == "last_n" or not held.earliest, "a window without a window"
            assert held is not self._idle or len(held.text) == cells, "an idle text has room"
        assert self._can.share or not self._cells.shared(), "cells are shared and cannot be"
