"""Events of a pull. Each is one line of `pull --json`, with its type in `event`."""

import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

_EVERY_S: Final = 0.1
_WINDOW_S: Final = 10.0
"""Time that the rate covers. It reads steadily, and is correct soon after a pause."""


class PullStarted(msgspec.Struct, frozen=True, tag_field="event", tag="found"):
    """The files that will be fetched."""

    name: str
    repository: str
    revision: str
    quantization: str
    format: str
    files: tuple[str, ...]
    done_bytes: int
    """Bytes that are here from an earlier download."""
    total_bytes: int


class Checking(msgspec.Struct, frozen=True, tag_field="event", tag="checking"):
    """The bytes of an earlier download are read again to hash the whole file."""

    file: str
    total_bytes: int


class Progress(msgspec.Struct, frozen=True, tag_field="event", tag="progress"):
    """Progress of all files together. `done_bytes` never falls, even if bytes are fetched again."""

    file: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float | None
    left_s: float | None


class Note(msgspec.Struct, frozen=True, tag_field="event", tag="note"):
    """Something unexpected, and how it is handled."""

    text: str


class PullFinished(msgspec.Struct, frozen=True, tag_field="event", tag="done"):
    """The model is complete."""

    name: str
    path: str
    """Path that an engine opens."""
    total_bytes: int
    fetched_bytes: int
    """Bytes that this pull received over the network."""
    hashed: bool = True
    """Whether the hub listed a hash of every file. Otherwise only lengths were checked."""
    trouble: str = ""
    """Why it cannot be run, as far as its first bytes show. Empty if they look right."""


PullEvent: TypeAlias = PullStarted | Checking | Progress | Note | PullFinished
EventSink: TypeAlias = Callable[[PullEvent], None]


class ProgressMeter:
    """Counts bytes over all files, and emits Progress at most ten times a second."""

    def __init__(
        self,
        total_bytes: int,
        done_bytes: int,
        emit: EventSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fetched_bytes = 0
        self._total = total_bytes
        self._done = self._shown = done_bytes
        self._emit = emit
        self._clock = clock
        self._next_s = clock()
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])

    def add(self, file: str, count: int) -> None:
        """Count bytes of a file that were written to disk."""
        self.fetched_bytes += count
        self._done += count
        self._shown = max(self._shown, min(self._done, self._total))
        if self._clock() >= self._next_s:
            self.show(file)

    def discard(self, count: int) -> None:
        """Take back bytes that were counted and then discarded."""
        self._done -= count

    def show(self, file: str) -> None:
        """Emit the progress now."""
        now = self._clock()
        self._next_s = now + _EVERY_S
        self._seen.append((now, self.fetched_bytes))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        rate = 0.0
        if now > since:
            rate = (self.fetched_bytes - before) / (now - since)
        left = None
        if rate > 0:
            left = (self._total - self._done) / rate
        self._emit(Progress(file, self._shown, self._total, rate or None, left))
