"""Disk tier for blocks of a paged KV cache: blocks go from host memory to the disk, and back the same way.

A block on disk is named by the digest of its node in the prefix tree. A thread of the lowest priority writes
blocks, a few per second while steps run and the rest while the engine is idle. The blocks of a text are written
in order, so that a killed program leaves a usable prefix. Several threads load blocks into host memory.
"""

import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import lcm
from typing import cast

import numpy as np

from localchat.backend_api.interface import MemoryOp, Runner, StepPlan
from localchat.backend_api.kv_transfer import HostBlockRunner
from localchat.core.kv_cache.disk_tier import (
    DAMAGED,
    MIN_STORED_TOKENS,
    NO_ROOM,
    DiskRead,
    DiskTier,
)
from localchat.core.kv_cache.paged import PagedKVCacheManager
from localchat.core.kv_cache.prefix_tree import PrefixNode
from localchat.core.sequence import RequestState
from localchat.kv_store.entry import Entry, checksum
from localchat.kv_store.store import KVStore, ReadBack
from localchat.kv_store.tree import Match

_MAX_READERS = 8
"""More readers wait for Python's lock. Of 8, 12 and 16, 8 were the fastest on 16 cores."""
_PART_BYTES = 128_000_000
"""Size of a part. The device loads one part while the next is read."""
_MAX_PENDING_BYTES = 32_000_000
"""Size of the blocks that wait to be written. They delay a new request by about 20 ms."""
_PACE_S = 0.25
"""Time between two blocks that are written while steps run. Writing holds Python's lock: without a pause, 8
clients of a 7B model on an H200 lost a quarter of their tokens per second, and 64 clients a fifth."""
_COPY_WAIT_S = 0.001
_MEASURED_BYTES = 20_000_000
"""Smaller reads do not measure the speed of the disk."""
_NEW_RATE = 0.1
_TRY_AGAIN = 0.8
SLOW = "the disk reads more slowly than the prompt is computed"


@dataclass(slots=True)
class _Reserved:
    """Host blocks that are being filled for a request."""

    after: bytes
    """Digest of the block before the next one to load."""
    numbers: list[int]
    buffers: list[memoryview]


class BlockDiskTier(DiskTier):
    """See DiskTier. For runners with host blocks."""

    def __init__(
        self,
        store: KVStore,
        description: str,
        model: str,
        runner: Runner,
        kv_cache: PagedKVCacheManager,
        *,
        min_tokens: int = MIN_STORED_TOKENS,
        part_bytes: int = _PART_BYTES,
    ) -> None:
        """`description`: everything that the KV of given tokens depends on: model file and build.

        The KV cache manager's digests hash it too.
        """
        can = runner.capabilities
        assert can.host_blocks, "this runner has no host blocks"
        self._runner = runner
        self._blocks = cast(HostBlockRunner, runner)
        self._kv_cache = kv_cache
        self._size = can.block_tokens
        self._block_bytes = can.block_tokens * can.bytes_per_token
        self._part_blocks = max(1, part_bytes // self._block_bytes)
        self._exact_chunk = lcm(can.exact_chunk_tokens, self._size)
        layout = f"{can.kv_type}\0{self._size}\0{self._block_bytes}\0{can.host_layout}"
        super().__init__(store, f"{description}\0{layout}", model, _MAX_PENDING_BYTES)
        readers = min(_MAX_READERS, os.cpu_count() or 1)
        self._readers = ThreadPoolExecutor(readers, "kv-block-reader")
        self._reserved: dict[int, _Reserved] = {}
        self._written: deque[int] = deque()
        """Host blocks that the writer no longer needs. The writer appends to this."""
        self._handed_s = 0.0
        """Time at which the writer last got a block."""
        self._prefill_s = 0.0
        """Seconds per byte of computed KV. 0: not measured yet."""
        self._read_s = 0.0
        """Seconds per byte of loaded KV. 0: not measured yet."""
        kv_cache.stored_from = min_tokens

    def _find(self, request_state: RequestState) -> Match | None:
        """Return the stored blocks worth loading, after reserving host blocks for them."""
        self._unpin()
        request = request_state.request
        tokens = request_state.tokens
        exact = request_state.deterministic
        first, parent = self._kv_cache.known_blocks(tokens, request.salt, exact=exact)
        if exact and self._kv_cache.known_blocks(tokens, request.salt)[0] > first:
            # Memory holds the next block with other bits, and cannot hold it twice.
            return None
        ids = np.asarray(tokens, np.int32)[:-1]
        size = self._size
        entries = self.namespace.tree.chain(
            parent, first * size, ids, size, self._block_bytes, exact=exact
        )
        if exact and not request_state.media:
            # The scheduler reuses whole chunks.
            end = (first + len(entries)) * size
            entries = entries[: (end - end % self._exact_chunk) // size - first]
        if not entries:
            return None
        if 0 < self._prefill_s < self._read_s:
            self._read_s *= _TRY_AGAIN
            request_state.disk_missed = SLOW
            return None
        numbers = self._kv_cache.reserve(len(entries), parent, request.salt)
        reserved = _Reserved(parent, numbers, [])
        for number in numbers:
            if (buffer := self._blocks.host_block(number)) is None:
                break
            reserved.buffers.append(buffer)
        entries = entries[: len(reserved.buffers)]
        if not entries:
            self._kv_cache.adopt(parent, request.salt, (), numbers, ())
            request_state.disk_missed = NO_ROOM
            return None
        self._reserved[request_state.id] = reserved
        return Match(tuple(entries), entries[-1].end)

    def read(
        self, request_state: RequestState, match: Match, then: Callable[[DiskRead], None]
    ) -> None:
        reserved = self._reserved[request_state.id]
        # `adopt` replaces the list of numbers while this reads.
        numbers = reserved.numbers
        self._reader.submit(self._read, request_state, match, numbers, reserved.buffers, then)

    def _read(
        self,
        request_state: RequestState,
        match: Match,
        numbers: Sequence[int],
        buffers: Sequence[memoryview],
        then: Callable[[DiskRead], None],
    ) -> None:
        """Load blocks and report them in parts. The device loads a part while others are read."""
        begun_s = time.perf_counter()
        step = self._part_blocks
        reading = self._readers.map(self.namespace.read_into, match.entries, buffers)
        for first in range(0, len(match.entries), step):
            part = match.entries[first : first + step]
            checksums = tuple(islice(reading, len(part)))
            count = self._whole(part, checksums, numbers[first : first + step])
            if last := count < len(part) or first + step >= len(match.entries):
                # Blocks must not be given back while a thread still fills them.
                deque(reading, 0)
            back = ReadBack(part[:count], ())
            elapsed_s = time.perf_counter() - begun_s
            then(DiskRead(request_state, match._replace(entries=part), back, elapsed_s, last))
            if last:
                self.namespace.touch(match.entries[: first + count])
                return

    def _whole(
        self, entries: Sequence[Entry], checksums: Sequence[bytes | None], numbers: Sequence[int]
    ) -> int:
        """Return how many entries, from the first, were read into these host blocks without damage."""
        read = len(entries)
        if None in checksums:
            read = checksums.index(None)
        try:
            sums = self._blocks.block_sums(numbers[:read])
        except RuntimeError:
            # The next step reports what is wrong with the device.
            return 0
        for index, block_sum in enumerate(sums):
            if checksum(entries[index], block_sum) != checksums[index]:
                self.namespace.discard(entries[index])
                return index
        return read

    def adopt(self, read: DiskRead) -> tuple[MemoryOp, ...]:
        request_state = read.request_state
        entries = read.back.entries
        salt = request_state.request.salt
        reserved = self._reserved[request_state.id]
        # The last part returns the unused blocks too.
        numbers = reserved.numbers if read.last else reserved.numbers[: len(entries)]
        reserved.numbers = reserved.numbers[len(entries) :]
        texts = [array("i", entry.ids.tobytes()) for entry in entries]
        exact = [entry.exact for entry in entries]
        adopted = self._kv_cache.adopt(reserved.after, salt, texts, numbers, exact)
        if entries:
            reserved.after = entries[-1].key
        request_state.read_back += adopted * self._size
        if request_state.read_back:
            request_state.read_s = read.elapsed_s
        if len(entries) < len(read.match.entries):
            request_state.disk_missed = DAMAGED
        if read.last:
            del self._reserved[request_state.id]
            size = request_state.read_back * self._block_bytes // self._size
            if size >= _MEASURED_BYTES:
                self._read_s = _average(self._read_s, read.elapsed_s / size)
        if adopted:
            return self._kv_cache.load_ahead(entries[adopted - 1].key, salt)
        return ()

    def observe_prefill(self, tokens: int, elapsed_s: float) -> None:
        bytes_ = max(1, tokens) * self._runner.capabilities.bytes_per_token
        if elapsed_s and tokens >= MIN_STORED_TOKENS:
            self._prefill_s = _average(self._prefill_s, elapsed_s / bytes_)

    @property
    def behind(self) -> bool:
        return self._store.writer.pending_bytes > 0 and bool(self._kv_cache.unstored)

    def step_launched(self) -> None:
        """Pass a block to the writer during a step, unless one was passed recently."""
        if self._written:
            self._unpin()
        if self._kv_cache.unstored and time.monotonic() >= self._handed_s + _PACE_S:
            self.store_next()

    def store_next(self) -> bool:
        """Pass one block to the writer. False: none is ready, or the writer is behind."""
        self._unpin()
        return super().store_next()

    def _store_piece(self) -> bool:
        return any(self._store_of(tip, owner) for tip, owner in list(self._kv_cache.unstored))

    def _store_of(self, tip: PrefixNode, owner: str) -> bool:
        """Pass the first missing block of a text to the writer."""
        unstored = self._kv_cache.unstored
        first = self._first_missing(tip, unstored[tip, owner])
        if first is None:
            self.namespace.own(owner, tip.digest)
            del unstored[tip, owner]
            return False
        assert first.parent is not None
        if first.host < 0 and not first.blocks:
            # It was evicted.
            del unstored[tip, owner]
            return False
        if not self._kv_cache.pin_saved(first):
            return False
        content = self._blocks.host_block(first.host)
        if content is None:
            self._kv_cache.unpin(first.host)
            return False
        ids = np.frombuffer(first.tokens, np.int32)
        start = first.end - self._size
        then = partial(self._written.append, first.host)
        self.namespace.put(
            first.parent.digest, start, ids, [content], owner=owner, exact=first.exact, then=then
        )
        self._handed_s = time.monotonic()
        unstored[tip, owner] = first.end
        return True

    def _first_missing(self, tip: PrefixNode, done: int) -> PrefixNode | None:
        """Return the first node after `done` tokens that is missing on the disk.

        A node with the bits of a fresh computation replaces one with others, which may have successors.
        """
        first = None
        node = tip
        while node.parent is not None and node.end > done:
            if not self.namespace.tree.has(node.parent.digest, node.digest, exact=node.exact):
                first = node
            node = node.parent
        return first

    def _unpin(self) -> None:
        while self._written:
            self._kv_cache.unpin(self._written.popleft())

    def _finish(self, deadline_s: float) -> None:
        while self._kv_cache.unstored and time.monotonic() < deadline_s:
            # Blocks may need several plans to reach host memory, if it has little room.
            while self._kv_cache.behind:
                self._runner.launch(StepPlan(0, memory=self._kv_cache.write_behind()))
                self._runner.collect()
            if not self._store.writable:
                break
            if not self.store_next():
                time.sleep(_COPY_WAIT_S)


def _average(average: float, value: float) -> float:
    """Return the moving average after one more value. An average of 0 has no values yet."""
    if not average:
        return value
    return average + _NEW_RATE * (value - average)
