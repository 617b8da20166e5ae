"""Disk tier of a paged KV cache: blocks go from host memory to the disk, and come back the same way.

A block of the disk is named by the digest of its node in the prefix tree. Blocks are written from host memory
by a thread of the lowest priority, a few a second while steps run and the others when nothing does; those of a
text in their order, so that a program that is killed leaves a beginning. They are read into host memory by
several threads, while other requests run, and the KV cache manager finds them there like any other.
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
from typing import NamedTuple, cast

import numpy as np

from localchat.backend_api.interface import MemoryOp, Runner, StepPlan
from localchat.backend_api.kv_transfer import HostBlockRunner
from localchat.core.kv_cache.disk_tier import (
    DAMAGED,
    MIN_STORED_TOKENS,
    NO_ROOM,
    DiskRead,
)
from localchat.core.kv_cache.paged import PagedKVCacheManager
from localchat.core.kv_cache.prefix_tree import PrefixNode
from localchat.core.sequence import RequestState
from localchat.kv_store.entry import Entry, checksum
from localchat.kv_store.store import KVStore, ReadBack
from localchat.kv_store.tree import Match

_MOST_READERS = 8
"""More wait for Python's lock: of 8, 12 and 16 these were the fastest on 16 cores."""
_PART_BYTES = 128_000_000
"""What is read in parts goes on to the device in parts."""
_MOST_PENDING_BYTES = 32_000_000
"""Of blocks that wait to be written. A request that comes meanwhile has them beside it: some 20 ms."""
_PACE_S = 0.25
"""Time between two blocks that are written while steps run. Written as fast as they are computed, they took 8
clients of a 7B on an H200 a quarter of their tokens a second, and 64 a fifth: it holds Python's lock."""
_COPY_WAIT_S = 0.001
_MEASURED_BYTES = 20_000_000
"""Smaller reads do not show how fast the disk is."""
_NEW_RATE = 0.1
_TRY_AGAIN = 0.8
SLOW = "the disk reads more slowly than the prompt is computed"


@dataclass(slots=True)
class _Reserved:
    """Host blocks that are being filled for a request."""

    after: bytes
    """Digest of the block behind which the next one is read."""
    numbers: list[int]
    buffers: list[memoryview]


class _HostBlocks(NamedTuple):
    """Host blocks that entries are read into."""

    numbers: tuple[int, ...]
    buffers: tuple[memoryview, ...]


class BlockDiskTier:
    """The disk tier of one loaded model with host blocks. Used by the engine core's thread."""

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
        """`description`: all that decides the KV of given tokens: model file and build; the KV cache manager's
        digests hash it too."""
        can = runner.capabilities
        assert can.host_blocks, "this runner has no host blocks"
        self._store = store
        self._runner = runner
        self._blocks = cast(HostBlockRunner, runner)
        self._kv_cache = kv_cache
        self._size = can.block_tokens
        self._block_bytes = can.block_tokens * can.bytes_per_token
        self._part_blocks = max(1, part_bytes // self._block_bytes)
        layout = f"{can.kv_type}\0{self._size}\0{self._block_bytes}\0{can.host_layout}"
        self._namespace = store.namespace(f"{description}\0{layout}", model)
        self._reader = ThreadPoolExecutor(1, "kv-reader")
        readers = min(_MOST_READERS, os.cpu_count() or 1)
        self._readers = ThreadPoolExecutor(readers, "kv-block-reader")
        self._reserved: dict[int, _Reserved] = {}
        self._written: deque[int] = deque()
        """Host blocks that the writer no longer needs. It appends to this."""
        self._handed_s = 0.0
        """When the writer was last given a block."""
        self._prefill_s = self._read_s = 0.0
        """Seconds per byte; 0: not measured yet."""
        kv_cache.stored_from = min_tokens

    # ------------------------------------------------------------------------ reading

    def find(self, request_state: RequestState) -> Match | None:
        """What is worth reading for a prompt, with host blocks reserved for it; None: nothing."""
        self._unpin()
        request = request_state.request
        if request.prompt_logprobs is not None:
            return None
        first, parent = self._kv_cache.known_blocks(request_state.tokens, request.salt)
        ids = np.asarray(request_state.tokens, np.int32)[:-1]
        size = self._size
        entries = self._namespace.chain(parent, first * size, ids, size, self._block_bytes)
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
            self._kv_cache.adopt(parent, request.salt, (), numbers)
            request_state.disk_missed = NO_ROOM
            return None
        self._reserved[request_state.id] = reserved
        return Match(tuple(entries), entries[-1].end)

    def read(
        self, request_state: RequestState, match: Match, then: Callable[[DiskRead], None]
    ) -> None:
        """Read in other threads, one of which calls `then` for each part."""
        reserved = self._reserved[request_state.id]
        blocks = _HostBlocks(tuple(reserved.numbers), tuple(reserved.buffers))
        self._reader.submit(self._read, request_state, match, blocks, then)

    def _read(
        self,
        request_state: RequestState,
        match: Match,
        blocks: _HostBlocks,
        then: Callable[[DiskRead], None],
    ) -> None:
        """Report in parts: while others are read, the device loads one. The readers wait for no part."""
        begun_s = time.perf_counter()
        step = self._part_blocks
        reading = self._readers.map(self._namespace.read_into, match.entries, blocks.buffers)
        for first in range(0, len(match.entries), step):
            part = match.entries[first : first + step]
            checksums = tuple(islice(reading, len(part)))
            count = self._whole(part, checksums, blocks.numbers[first : first + step])
            if last := count < len(part) or first + step >= len(match.entries):
                deque(reading, 0)  # before blocks that are still being filled are given back
            back = ReadBack(part[:count], ())
            elapsed_s = time.perf_counter() - begun_s
            then(DiskRead(request_state, match._replace(entries=part), back, elapsed_s, last))
            if last:
                self._namespace.touch(match.entries[: first + count])
                return

    def _whole(
        self, entries: Sequence[Entry], checksums: Sequence[bytes | None], numbers: Sequence[int]
    ) -> int:
        """How many entries from the first on were read into these host blocks without damage."""
        read = checksums.index(None) if None in checksums else len(entries)
        try:
            sums = self._blocks.block_sums(numbers[:read])
        except RuntimeError:
            return 0  # the next step says what is wrong with the device
        for at, found in enumerate(sums):
            if checksum(entries[at], found) != checksums[at]:
                self._namespace.discard(entries[at])
                return at
        return read

    def adopt(self, read: DiskRead) -> tuple[MemoryOp, ...]:
        """Make a part that was read findable, and note on the request how that went."""
        request_state = read.request_state
        entries = read.back.entries
        salt = request_state.request.salt
        reserved = self._reserved[request_state.id]
        end = None if read.last else len(entries)
        numbers, reserved.numbers = reserved.numbers[:end], reserved.numbers[len(entries) :]
        texts = [array("i", entry.ids.tobytes()) for entry in entries]
        adopted = self._kv_cache.adopt(reserved.after, salt, texts, numbers)
        reserved.after = entries[-1].key if entries else reserved.after
        request_state.read_back += adopted * self._size
        request_state.read_s = read.elapsed_s if request_state.read_back else 0.0
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

    # ------------------------------------------------------------------------ writing

    def observe_prefill(self, tokens: int, elapsed_s: float) -> None:
        """Note what a step of many prompt tokens took: the worth of an entry is the time that it saves."""
        bytes_ = max(1, tokens) * self._runner.capabilities.bytes_per_token
        if elapsed_s and tokens >= MIN_STORED_TOKENS:
            self._prefill_s = _average(self._prefill_s, elapsed_s / bytes_)
            self._namespace.seconds_per_byte = self._prefill_s

    @property
    def behind(self) -> bool:
        """Whether something has to be written and may wait for what is being written."""
        return self._store.writer.pending_bytes > 0 and bool(self._kv_cache.unstored)

    def step_launched(self) -> None:
        """Use the time of a step: hand a block to the writer, if none was for a while."""
        if self._written:
            self._unpin()
        if self._kv_cache.unstored and time.monotonic() >= self._handed_s + _PACE_S:
            self.store_next()

    def store_next(self) -> bool:
        """Hand one block to the writer. False: there is none now, or the writer is behind."""
        self._unpin()
        if not self._store.writable or self._store.writer.pending_bytes >= _MOST_PENDING_BYTES:
            return False
        return any(self._store_of(tip, owner) for tip, owner in list(self._kv_cache.unstored))

    def _store_of(self, tip: PrefixNode, owner: str) -> bool:
        """Hand the first block of a text that is missing on the disk to the writer."""
        unstored = self._kv_cache.unstored
        first = self._first_missing(tip, unstored[tip, owner])
        if first is None:
            self._namespace.own(owner, tip.digest)
            del unstored[tip, owner]
            return False
        assert first.parent is not None
        if first.host < 0 and not first.blocks:
            del unstored[tip, owner]  # it was evicted
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
        self._namespace.put(first.parent.digest, start, ids, [content], owner=owner, then=then)
        self._handed_s = time.monotonic()
        unstored[tip, owner] = first.end
        return True

    def _first_missing(self, tip: PrefixNode, done: int) -> PrefixNode | None:
        """The first node of a text, behind `done` tokens, that the disk has not."""
        first = None
        node = tip
        while node.parent is not None and node.end > done:
            if self._namespace.has(node.parent.digest, node.digest):
                break
            first = node
            node = node.parent
        return first

    def _unpin(self) -> None:
        while self._written:
            self._kv_cache.unpin(self._written.popleft())

    def finish(self, deadline_s: float) -> None:
        """Write what is left, until time.monotonic() is `deadline_s`: the engine is about to end."""
        while self._kv_cache.unstored and time.monotonic() < deadline_s:
            while self._kv_cache.behind:  # again, where host memory had no room
                self._runner.launch(StepPlan(0, memory=self._kv_cache.write_behind()))
                self._runner.collect()
            if not self._store.writable:
                break
            if not self.store_next():
                time.sleep(_COPY_WAIT_S)
        self._store.writer.drain(max(0.0, deadline_s - time.monotonic()))


def _average(known: float, new: float) -> float:
    return known + _NEW_RATE * (new - known) if known else new
