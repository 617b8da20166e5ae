"""Disk tier for states of slots: ranges of tokens, or whole states of models that cannot export ranges.

A state is exported while the engine is idle, one range after the other, so a new request waits for one range at
most (3 ms).
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import cast

import numpy as np

from localchat.backend_api.interface import MemoryOp, Runner, StateRange, StepPlan
from localchat.backend_api.kv_transfer import ExportingRunner
from localchat.backend_api.media import cut_after, cut_before
from localchat.core.kv_cache.disk_tier import (
    DAMAGED,
    MIN_STORED_TOKENS,
    NO_ROOM,
    DiskRead,
    DiskTier,
)
from localchat.core.kv_cache.slots import SlotKVCacheManager, UnstoredText
from localchat.core.kv_cache.token_prefix import Ids
from localchat.core.sequence import RequestState
from localchat.kv_store.entry import Entry
from localchat.kv_store.store import KVStore, ReadBack
from localchat.kv_store.tree import Match

MIN_READ_TOKENS = 64
"""Loading fewer tokens saves nothing."""
_RANGE_BYTES = 2_000_000
_RANGE_TOKENS = 256
_MAX_RANGE_TOKENS = 4096
_MAX_PENDING_BYTES = 128_000_000
_EXACT = "\0exact by turns, the last two joined if short"
"""Suffix of the salt of texts whose KV has the bits of a fresh computation. Names the rule of the chunks.

Their length follows, because it depends on the number of threads.
"""


class SlotDiskTier(DiskTier):
    """See DiskTier."""

    def __init__(
        self,
        store: KVStore,
        description: str,
        model: str,
        runner: Runner,
        kv_cache: SlotKVCacheManager,
        *,
        min_tokens: int = MIN_STORED_TOKENS,
        min_read_tokens: int = MIN_READ_TOKENS,
        range_tokens: int = 0,
    ) -> None:
        """`description`: everything that the KV of given tokens depends on: model file, build, KV type."""
        can = runner.capabilities
        assert can.exports, "this runner exports nothing"
        super().__init__(
            store, f"{description} {can.exports} {can.kv_type}", model, _MAX_PENDING_BYTES
        )
        self._runner = runner
        self._exporter = cast(ExportingRunner, runner)
        self._kv_cache = kv_cache
        self._whole = can.exports == "whole"
        self._exact_salt = f"{_EXACT} {can.exact_chunk_tokens}"
        self._bytes_per_token = max(1, can.bytes_per_token)
        self._range_tokens = range_tokens or _range_tokens(self._bytes_per_token)
        self._min_tokens = min_tokens
        self._min_read_tokens = min_read_tokens
        self._handed: set[bytes] = set()
        """Keys of the ranges of the current text that were passed to the writer."""

    def _find(self, request_state: RequestState) -> Match | None:
        request = request_state.request
        ids = np.asarray(request_state.tokens, np.int32)[:-1]
        usable = self._kv_cache.can_truncate if self._whole else None
        salts = [request.salt + self._exact_salt]
        if not request_state.deterministic:
            salts.append(request.salt)
        matches = [self.namespace.find(salt, ids, usable) for salt in salts]
        match = max(matches, key=lambda match: match.tokens)
        request_state.disk_exact = match is matches[0]
        if match.tokens < self._min_read_tokens:
            return None
        # The scheduler chooses where an exact prefix ends.
        chunk = int(request_state.deterministic)
        cached = self._kv_cache.find_prefix(request_state.tokens, request.salt, chunk).cached
        if match.tokens >= cached + self._min_read_tokens:
            return match
        return None

    def read(
        self, request_state: RequestState, match: Match, then: Callable[[DiskRead], None]
    ) -> None:
        def completed(future: Future[DiskRead]) -> None:
            then(future.result())

        self._reader.submit(self._read, request_state, match).add_done_callback(completed)

    def _read(self, request_state: RequestState, match: Match) -> DiskRead:
        begun_s = time.perf_counter()
        try:
            back = self.namespace.read(match)
        except MemoryError:
            back = ReadBack((), ())
        return DiskRead(request_state, match, back, time.perf_counter() - begun_s)

    def adopt(self, read: DiskRead) -> tuple[MemoryOp, ...]:
        request_state = read.request_state
        entries = read.back.entries
        if not entries:
            request_state.disk_missed = DAMAGED
            return ()
        ids = np.concatenate([entry.ids for entry in entries])
        ranges = tuple(
            StateRange(entry.start, entry.end, payload)
            for entry, payload in zip(entries, read.back.payloads, strict=True)
        )
        salt = request_state.request.salt
        earliest = entries[-1].earliest
        exact = 0
        if request_state.disk_exact:
            exact = len(ids)
        ops = self._kv_cache.adopt(ids, salt, earliest, ranges, exact).memory
        if not ops:
            request_state.disk_missed = NO_ROOM
            return ()
        if len(entries) < len(read.match.entries):
            request_state.disk_missed = DAMAGED
        request_state.read_back = min(read.match.tokens, len(ids))
        request_state.read_s = read.elapsed_s
        return ops

    def observe_prefill(self, tokens: int, elapsed_s: float) -> None:
        """Do nothing: loading a slot's KV is always faster than computing it on a CPU."""

    @property
    def behind(self) -> bool:
        full = self._store.writer.pending_bytes >= self._max_pending_bytes
        return full and next(self._kv_cache.unstored(), None) is not None

    def step_launched(self) -> None:
        """Do nothing: slots cannot be exported while the runner is busy."""

    def _store_piece(self) -> bool:
        """Pass one range of tokens to the writer."""
        return any(map(self._store_range, self._kv_cache.unstored()))

    def _store_range(self, text: UnstoredText) -> bool:
        """Queue the next unstored range of a text. Return whether a range was queued."""
        salt = text.salt
        ids = text.ids
        if self._stores_exact(text):
            salt += self._exact_salt
            ids = ids[: text.exact]
        if not self._whole:
            ids = ids[: cut_before(text.ids.tolist(), len(ids))]
        length = len(ids)
        start, parent = self.namespace.covered(salt, ids)
        if start >= length:
            self.namespace.own(text.owner, parent)
        if start >= length or length < self._shortest(ids):
            text.mark_stored()
            return False
        end = min(start - start % self._range_tokens + self._range_tokens, length)
        end = cut_after(ids.tolist(), end)
        if self._whole:
            start = 0
            end = length
            parent = self.namespace.root(salt)
        payload = self._export(text, start, end)
        if payload is None and text.slot is None and self._evict_idle():
            payload = self._export(text, start, end)
        if payload is None:
            text.mark_stored()
            return False
        earliest = 0
        older: Sequence[Entry] = ()
        if self._whole:
            earliest = text.earliest
            older = self.namespace.whole_prefixes(salt, ids)
        key = self.namespace.put(
            parent, start, ids[start:end], [payload], owner=text.owner, earliest=earliest
        )
        self.namespace.supersede(older)
        # A range that is passed a second time was dropped before, because the store has no room.
        if end == length or key in self._handed:
            text.mark_stored()
            self._handed.clear()
        else:
            self._handed.add(key)
        return True

    def _stores_exact(self, text: UnstoredText) -> bool:
        """Return whether to store the exact tokens of a text, without the answer after them."""
        length = len(text.ids)
        if text.exact < max(self._shortest(text.ids), length // 2):
            return False
        return not self._whole or text.exact == length

    def _shortest(self, ids: Ids) -> int:
        """Return the length from which a text is stored."""
        if (ids < 0).any():
            # A picture costs more than its tokens: it is encoded too.
            return min(MIN_READ_TOKENS, self._min_tokens)
        return self._min_tokens

    def _export(self, text: UnstoredText, start: int, end: int) -> memoryview | None:
        if text.slot is not None:
            return self._exporter.export_slot(text.slot, start, end)
        return self._exporter.export_saved(text.key, start, end)

    def _evict_idle(self) -> bool:
        """Move the idle conversation to RAM. Return False if it stays.

        To export a range of a saved state, the runner loads all of it into the cache.
        """
        operations = self._kv_cache.evict_idle()
        if not operations:
            return False
        # Nothing is in flight, and the scheduler has no operations for a plan.
        self._runner.launch(StepPlan(number=0, rows=(), memory=operations))
        self._runner.collect()
        return True

    def _finish(self, deadline_s: float) -> None:
        while time.monotonic() < deadline_s:
            if not self.store_next() and not self.behind:
                break
            if self.behind:
                self._store.writer.drain(0.05)


def _range_tokens(bytes_per_token: int) -> int:
    """Return the tokens of a range: about 2 MB, in multiples of 256."""
    tokens = _RANGE_BYTES // bytes_per_token // _RANGE_TOKENS * _RANGE_TOKENS
    return min(max(tokens, _RANGE_TOKENS), _MAX_RANGE_TOKENS)
