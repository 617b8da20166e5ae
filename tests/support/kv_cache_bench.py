"""Drives a KV cache manager and a storage by its operations, and compares both
always."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from localchat.backend_api.interface import (
    Capabilities,
    Enter,
    MemoryOp,
    SamplingParams,
    StepPlan,
    StepRow,
)
from localchat.core.kv_cache.manager import CacheUpdate, KVCacheManager, PrefixHit, ValidTokens
from tests.support.cache_integrity import check
from tests.support.scripted_kv import BlockStorage, SlotStorage, storage_for


def capabilities(**changes: object) -> Capabilities:
    """A model for tests: 64 cells, 4 slots, 10 bytes a token."""
    values: dict[str, object] = {
        "context_tokens": 64,
        "kv_tokens": 64,
        "max_slots": 4,
        "max_rows": 4,
        "max_step_tokens": 64,
        "bytes_per_token": 10,
    }
    return Capabilities(**(values | changes))  # type: ignore[arg-type]


@dataclass
class Sequenced:
    """A running sequence: `known` tokens, of which `computed` are in the cache; `room` beyond
    them."""

    seq: int
    salt: str
    known: list[int]
    computed: int
    room: int
    new_blocks: list[int] = field(default_factory=list)
    new_window_blocks: list[int] = field(default_factory=list)


class Bench:
    """Checks after every change: integrity, sums, and that storage holds what the sequences say."""

    def __init__(self, kv_cache: KVCacheManager, can: Capabilities) -> None:
        self.kv_cache = kv_cache
        self.can = can
        self.storage = storage_for(can)
        self.running: dict[int, Sequenced] = {}
        self.computed_texts: list[tuple[str, list[int]]] = []
        self.ops: list[MemoryOp] = []
        self.log: list[MemoryOp] = []
        self._enter: list[Enter] = []
        self._leave: list[int] = []
        self._next = 0

    # ---------------------------------------------------------------- changes

    def find_prefix(self, tokens: Sequence[int], salt: str = "") -> PrefixHit:
        before = self.kv_cache.usage()
        hit = self.kv_cache.find_prefix(tokens, salt)
        assert self.kv_cache.usage() == before
        assert 0 <= hit.cached < len(tokens)
        texts = [text for owner, text in self.computed_texts if owner == salt]
        assert hit.cached <= max((common(text, tokens) for text in texts), default=0)
        return hit

    def allocate(self, tokens: Sequence[int], salt: str = "") -> int | None:
        """The number of the new sequence, None where there is no room."""
        hit = self.find_prefix(tokens, salt)
        before = self.kv_cache.usage()
        self._next += 1
        update = self.kv_cache.allocate(self._next, tokens, hit, salt)
        if update is None:
            assert self.kv_cache.usage() == before
            self.check()
            return None
        self._start(Sequenced(self._next, salt, list(tokens), hit.cached, 1), update)
        return self._next

    def fork(self, seq: int) -> int | None:
        parent = self.running[seq]
        before = self.kv_cache.usage()
        self._next += 1
        update = self.kv_cache.fork(seq, self._next)
        if update is None:
            assert self.kv_cache.usage() == before
            self.check()
            return None
        known = parent.known[: parent.computed]
        self._start(Sequenced(self._next, parent.salt, known, len(known), 1), update)
        return self._next

    def _start(self, new: Sequenced, update: CacheUpdate) -> None:
        self.running[new.seq] = new
        new.new_blocks.extend(update.new_blocks)
        new.new_window_blocks.extend(update.new_window_blocks)
        self._do(update.memory)
        slot = self.kv_cache.slot(new.seq)
        known = tuple(self._tagged(new, new.known))
        self._enter.append(Enter(new.seq, slot, known, len(known), SamplingParams()))
        self.check()

    def release(self, seq: int, *, keep: bool = True) -> None:
        if any(enter.seq == seq for enter in self._enter):
            self._enter = [enter for enter in self._enter if enter.seq != seq]
        else:
            self._leave.append(seq)
        del self.running[seq]
        self._do(self.kv_cache.release(seq, keep=keep).memory)
        self.check()

    def checkpoint(self, seq: int) -> None:
        self._do(self.kv_cache.checkpoint(seq).memory)
        self.check()

    def compute(
        self,
        seq: int,
        tokens: int = 10**9,
        drafts: Sequence[int] = (),
        accept: int = 0,
        done: int | None = None,
    ) -> bool:
        """A step of one row: up to `tokens` known tokens, then `drafts`, of which `accept` turn out
        right. `done`: the step was aborted after so many. False where there is no room."""
        it = self.running[seq]
        row = it.known[it.computed : it.computed + tokens]
        wide = [*row, *drafts]
        update = self.kv_cache.extend(seq, it.computed + len(wide))
        if update is None:
            self.check()
            return False
        self._do(update.memory)
        it.new_blocks.extend(update.new_blocks)
        it.new_window_blocks.extend(update.new_window_blocks)
        it.room = max(it.room, len(wide))
        self.flush()
        wide = wide if done is None else wide[:done]
        plan_row = StepRow(seq, self.kv_cache.slot(seq), it.computed, tuple(self._tagged(it, wide)))
        self.storage.write(plan_row, self._tagged(it, wide))
        it.known[it.computed + len(row) :] = [
            *it.known[it.computed + len(row) :],
            *drafts[:accept],
        ]
        computed = it.computed + min(len(wide), len(row) + accept)
        earliest = self.storage.earliest(plan_row.slot)
        committed = self.kv_cache.commit(seq, it.known, ValidTokens(computed, earliest))
        assert committed.kept is None
        self._do(committed.memory)
        it.computed, it.room = computed, 0
        self.computed_texts.append((it.salt, it.known[:computed]))
        self.check()
        return True

    # ---------------------------------------------------------------- the runner's side

    def _do(self, memory: tuple[MemoryOp, ...]) -> None:
        self.ops.extend(memory)
        self.log.extend(memory)

    def _tagged(self, it: Sequenced, tokens: Sequence[int]) -> list[int]:
        """Storage sees tokens marked with their salt, so that no text under another salt looks
        alike."""
        return [token + 1000 * (1 + sum(it.salt.encode())) for token in tokens]

    def flush(self) -> None:
        """A plan with everything that waits, and no rows."""
        behind = self.kv_cache.write_behind()
        self.log.extend(behind)
        self.storage.begin(
            StepPlan(
                0,
                memory=(*self.ops, *behind),
                enter=tuple(self._enter),
                leave=tuple(self._leave),
            )
        )
        self.ops, self._enter, self._leave = [], [], []
        for it in self.running.values():
            slot = self.kv_cache.slot(it.seq)
            if isinstance(self.storage, BlockStorage):
                new = tuple(it.new_blocks), tuple(it.new_window_blocks)
                it.new_blocks, it.new_window_blocks = [], []
                self.storage.write(StepRow(it.seq, slot, it.computed, (), (), *new), ())
            assert self.storage.held(slot) == self._tagged(it, it.known[: it.computed])
        if isinstance(self.storage, SlotStorage):
            usage = self.kv_cache.usage()
            rooms = sum(it.room for it in self.running.values())
            assert self.storage.used == usage.live + usage.cached - rooms
            assert sum(self.storage.saved().values()) == usage.swapped

    def check(self) -> None:
        check(self.kv_cache)
        usage = self.kv_cache.usage()
        assert usage.live + usage.cached + usage.free == usage.total
        assert 0 <= usage.shared <= usage.live
        slots = [self.kv_cache.slot(seq) for seq in self.running]
        assert len(set(slots)) == len(slots)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
