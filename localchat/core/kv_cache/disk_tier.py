"""Disk tier of the KV cache: the KV of earlier texts is loaded from disk before a request is scheduled.

Loading happens in threads, while other requests run. What was loaded goes to host memory, where the KV cache
manager finds it like any other KV. Writing happens in pieces while the engine is idle. Two kinds of caches
store different pieces: ranges of a slot's state (slot_disk_tier.py) and blocks (block_disk_tier.py).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from localchat.backend_api.interface import MemoryOp
from localchat.core.sequence import RequestState
from localchat.kv_store.store import KVStore, ReadBack
from localchat.kv_store.tree import Match

MIN_STORED_TOKENS = 256
"""Shorter texts are computed again in a second or two."""
DAMAGED = "its copy on disk was damaged or is gone"
NO_ROOM = "its copy on disk is larger than the RAM for idle conversations (--cache-ram)"


class DiskRead(NamedTuple):
    """Part of a request's prompt that was loaded from disk."""

    request_state: RequestState
    match: Match
    back: ReadBack
    elapsed_s: float
    last: bool = True
    """This is the last part of the request."""


class DiskTier(ABC):
    """The disk tier of one loaded model. Used by the engine core's thread."""

    def __init__(self, store: KVStore, layout: str, model: str, max_pending_bytes: int) -> None:
        """`layout`: everything that the stored bytes depend on.

        `max_pending_bytes`: RAM for pieces that are not written yet.
        """
        self._store = store
        self.namespace = store.namespace(layout, model)
        """Entries of this model."""
        self._max_pending_bytes = max_pending_bytes
        self._reader = ThreadPoolExecutor(1, "kv-reader")

    def find(self, request_state: RequestState) -> Match | None:
        """Return the stored prefix worth loading. None if RAM holds as much, or the disk holds nothing."""
        if request_state.request.prompt_logprobs is not None:
            return None
        return self._find(request_state)

    @abstractmethod
    def _find(self, request_state: RequestState) -> Match | None: ...

    @abstractmethod
    def read(
        self, request_state: RequestState, match: Match, then: Callable[[DiskRead], None]
    ) -> None:
        """Load a match in other threads. They call `then` with each part."""

    @abstractmethod
    def adopt(self, read: DiskRead) -> tuple[MemoryOp, ...]:
        """Make a loaded part findable, and record the result on the request."""

    @abstractmethod
    def observe_prefill(self, tokens: int, elapsed_s: float) -> None:
        """Learn how long a step of prompt tokens takes."""

    @property
    @abstractmethod
    def behind(self) -> bool:
        """Whether pieces wait until the writer has written others."""

    @abstractmethod
    def step_launched(self) -> None:
        """Use the time of a step to write, if the runner allows it."""

    def store_next(self) -> bool:
        """Pass one piece to the writer. False: nothing is left, or the writer is behind."""
        pending_bytes = self._store.writer.pending_bytes
        if not self._store.writable or pending_bytes >= self._max_pending_bytes:
            return False
        return self._store_piece()

    @abstractmethod
    def _store_piece(self) -> bool: ...

    def finish(self, deadline_s: float) -> None:
        """Write what is left before the engine exits, until time.monotonic() is `deadline_s`."""
        self._finish(deadline_s)
        self._store.writer.drain(max(0.0, deadline_s - time.monotonic()))

    @abstractmethod
    def _finish(self, deadline_s: float) -> None: ...
