"""Disk tier of the KV cache: what is kept of a text is read back before the request is scheduled.

Reading happens in a thread of its own, while other requests run; what was read becomes a state in host memory,
and the KV cache manager finds it there like any other. Writing happens while the engine is idle, one range of
tokens after the other, so a request that comes waits for one range at most (3 ms).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, cast

import numpy as np

from localchat.backend_api.interface import MemoryOp, Runner, StateRange
from localchat.backend_api.kv_transfer import ExportingRunner
from localchat.core.kv_cache.manager import exact_chunk_tokens
from localchat.core.kv_cache.slots import SlotKVCacheManager, UnstoredText
from localchat.core.sequence import RequestState
from localchat.kv_store.store import KVStore, ReadBack
from localchat.kv_store.tree import Match

MIN_STORED_TOKENS = 256
"""Shorter texts are computed again in a second or two."""
MIN_READ_TOKENS = 64
"""Reading fewer than these saves nothing."""
_RANGE_BYTES = 2_000_000
_RANGE_TOKENS = 256
_MOST_RANGE_TOKENS = 4096
_MOST_PENDING_BYTES = 128_000_000
"""RAM for what waits to be written."""
DAMAGED = "what the disk kept of it was damaged or is gone"
_EXACT = "\0exact"
"""Marks the salt of texts whose KV has the bits of a fresh computation."""
NO_ROOM = "what the disk keeps of it is larger than the RAM for idle conversations (--cache-ram)"


class DiskRead(NamedTuple):
    """Result of reading what the disk keeps of one request's prompt."""

    request_state: RequestState
    match: Match
    back: ReadBack
    elapsed_s: float
    last: bool = True
    """Nothing more is read for this request."""


class DiskTier:
    """The disk tier of one loaded model. Used by the engine core's thread."""

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
        """`description`: all that decides the KV of given tokens: model file, build, KV type."""
        can = runner.capabilities
        assert can.exports, "this runner exports nothing"
        self._store = store
        self._runner = cast(ExportingRunner, runner)
        self._kv_cache = kv_cache
        self._whole = can.exports == "whole"
        self._bytes_per_token = max(1, can.bytes_per_token)
        self._exact_chunk = exact_chunk_tokens(can)
        self._range_tokens = range_tokens or _range_tokens(self._bytes_per_token)
        self._min_tokens = min_tokens
        self._min_read_tokens = min_read_tokens
        self._namespace = store.namespace(f"{description} {can.exports} {can.kv_type}", model)
        self._reader = ThreadPoolExecutor(1, "kv-reader")
        self._handed: set[bytes] = set()
        """Keys of the ranges of the text that is being written."""

    # ------------------------------------------------------------------------ reading

    def find(self, request_state: RequestState) -> Match | None:
        """What is worth reading for a prompt; None: RAM has as much of it, or nothing is kept."""
        request = request_state.request
        if request.prompt_logprobs is not None:
            return None
        ids = np.asarray(request_state.tokens, np.int32)[:-1]
        usable = self._kv_cache.can_truncate if self._whole else None
        salts = [request.salt + _EXACT]
        if not request_state.deterministic:
            salts.append(request.salt)
        matches = [self._namespace.find(salt, ids, usable) for salt in salts]
        match = max(matches, key=lambda one: one.tokens)
        request_state.disk_exact = match is matches[0]
        if match.tokens < self._min_read_tokens:
            return None
        chunk = self._exact_chunk if request_state.deterministic else 0
        cached = self._kv_cache.find_prefix(request_state.tokens, request.salt, chunk).cached
        if match.tokens >= cached + self._min_read_tokens:
            return match
        return None

    def read(
        self, request_state: RequestState, match: Match, then: Callable[[DiskRead], None]
    ) -> None:
        """Read in another thread, which calls `then`."""

        def completed(future: Future[DiskRead]) -> None:
            then(future.result())

        self._reader.submit(self._read, request_state, match).add_done_callback(completed)

    def _read(self, request_state: RequestState, match: Match) -> DiskRead:
        begun_s = time.perf_counter()
        try:
            back = self._namespace.read(match)
        except MemoryError:
            back = ReadBack((), ())
        return DiskRead(request_state, match, back, time.perf_counter() - begun_s)

    def adopt(self, read: DiskRead) -> tuple[MemoryOp, ...]:
        """Put what was read into host memory, and note on the request how that went."""
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
        exact = len(ids) if request_state.disk_exact else 0
        ops = self._kv_cache.adopt(ids, salt, earliest, ranges, exact).memory
        if not ops:
            request_state.disk_missed = NO_ROOM
            return ()
        if len(entries) < len(read.match.entries):
            request_state.disk_missed = DAMAGED
        request_state.read_back = min(read.match.tokens, len(ids))
        request_state.read_s = read.elapsed_s
        return ops

    # ------------------------------------------------------------------------ writing

    def observe_prefill(self, tokens: int, elapsed_s: float) -> None:
        """Note what a step of prompt tokens took: the worth of an entry is the time that it saves."""
        rate = elapsed_s / (max(1, tokens) * self._bytes_per_token)
        known = self._namespace.seconds_per_byte
        self._namespace.seconds_per_byte = 0.9 * known + 0.1 * rate

    @property
    def behind(self) -> bool:
        """Whether something has to be written and waits for what is being written."""
        full = self._store.writer.pending_bytes >= _MOST_PENDING_BYTES
        return full and next(self._kv_cache.unstored(), None) is not None

    def step_launched(self) -> None:
        """Do nothing: the runner is busy, and exporting would make it wait."""

    def store_next(self) -> bool:
        """Hand one range of tokens to the writer. False: nothing is left, or the writer is behind.

        Only while the engine is idle.
        """
        if not self._store.writable or self._store.writer.pending_bytes >= _MOST_PENDING_BYTES:
            return False
        return any(map(self._store_range, self._kv_cache.unstored()))

    def _store_range(self, text: UnstoredText) -> bool:
        salt = text.salt
        ids = text.ids
        if self._stores_exact(text):
            salt += _EXACT
            ids = ids[: text.exact]
        length = len(ids)
        start, parent = self._namespace.covered(salt, ids)
        if length < self._min_tokens or start >= length:
            if start >= length:
                self._namespace.own(text.owner, parent)
            text.mark_stored()
            return False
        end = min(start - start % self._range_tokens + self._range_tokens, length)
        if self._whole:
            start = 0
            end = length
            parent = self._namespace.root(salt)
        payload = self._export(text, start, end)
        if payload is None:
            text.mark_stored()
            return False
        older = self._namespace.whole_prefixes(salt, ids) if self._whole else ()
        key = self._namespace.put(
            parent,
            start,
            ids[start:end],
            [payload],
            owner=text.owner,
            earliest=text.earliest if self._whole else 0,
        )
        self._namespace.supersede(older)
        # A range that is handed over a second time was not kept: the store has no room.
        if end == length or key in self._handed:
            text.mark_stored()
            self._handed.clear()
        else:
            self._handed.add(key)
        return True

    def _stores_exact(self, text: UnstoredText) -> bool:
        """Return whether to store the exact tokens of a text, without the answer behind them."""
        length = len(text.ids)
        if text.exact < max(self._min_tokens, length // 2):
            return False
        return not self._whole or text.exact == length

    def _export(self, text: UnstoredText, start: int, end: int) -> memoryview | None:
        if text.slot is not None:
            return self._runner.export_slot(text.slot, start, end)
        return self._runner.export_saved(text.key, start, end)

    def finish(self, deadline_s: float) -> None:
        """Write what is left, until time.monotonic() is `deadline_s`: the engine is about to end."""
        while time.monotonic() < deadline_s:
            if not self.store_next() and not self.behind:
                break
            if self.behind:
                self._store.writer.drain(0.05)
        self._store.writer.drain(max(0.0, deadline_s - time.monotonic()))


def _range_tokens(bytes_per_token: int) -> int:
    """Tokens of a range: about 2 MB, a multiple of 256."""
    wanted = _RANGE_BYTES // bytes_per_token // _RANGE_TOKENS * _RANGE_TOKENS
    return min(max(wanted, _RANGE_TOKENS), _MOST_RANGE_TOKENS)
