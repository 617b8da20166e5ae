"""Reads parts of files to a device at the speed of page cache or disk.

One thread copies 1 GB/s from mapped pages, because each page faults. Eight threads that read large pieces into
pinned memory reach 30 GB/s. Most tensors are too small for that, so tensors that are neighbors in a file are
read together, and the next ones while the caller works on these.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import torch

_THREADS: Final = 8
_PIECE: Final = 4 << 20
"""Bytes of one read."""
_STAGE: Final = 64 << 20
"""Bytes of a pinned buffer, and most bytes of tensors that are read together."""
_STAGES: Final = 3
"""Buffers: one is copied to the device while the others are filled."""
_KEPT: Final = 6
"""Runs on the device. A layer is read in another order than it is stored, so one run is not enough."""
_HOLE: Final = 4096
"""Most bytes between neighbors: a format may align its tensors."""


class Extent(NamedTuple):
    """Bytes of a file."""

    path: Path
    offset: int
    size: int


class DeviceReader:
    """Read files for one load. The threads end with the reader."""

    def __init__(self, device: torch.device, extents: Iterable[Extent] = ()) -> None:
        """`extents`: tensors that will be read whole, in any order."""
        self._device = device
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")
        self._runs = _runs(extents)
        self._numbers = {
            extent: number for number, run in enumerate(self._runs) for extent in run.unread
        }
        """Number of the run of each extent."""
        self._stages: deque[_Stage] = deque()
        """Free buffers, the one that was used last at the end."""
        self._stages_made = 0
        self._filling: deque[_Run] = deque()
        self._kept: deque[_Run] = deque()

    def read(self, path: Path, offset: int, size: int) -> torch.Tensor:
        """Return `size` bytes of a file from `offset`, uint8 on the device.

        Raises OSError, and ValueError if the file is too short."""
        extent = Extent(path, offset, size)
        number = self._numbers.pop(extent, None)
        if number is not None:
            part = self._from_run(number, extent)
            if part is not None:
                return part
        out = torch.empty(size, dtype=torch.uint8, device=self._device)
        for first in range(0, size, _STAGE):
            length = min(_STAGE, size - first)
            stage = self._free_stage()
            self._upload(stage, self._fill(stage, path, offset + first, length), out[first:])
        return out

    def _from_run(self, number: int, extent: Extent) -> torch.Tensor | None:
        """Read an extent with its neighbors. None: they cannot be read, or are no longer kept."""
        run = self._runs[number]
        if not run.begun:
            self._begin(run, self._free_stage())
        for following in self._runs[number + 1 : number + _STAGES]:
            # A buffer that is in use is not worth waiting for.
            if not following.begun and (self._stages or self._stages_made < _STAGES):
                self._begin(following, self._free_stage())
        while run in self._filling:
            self._finish(self._filling.popleft())
        if run.content is None:
            return None
        first = extent.offset - run.offset
        # A view would keep the whole run in memory.
        part = run.content[first : first + extent.size].clone()
        run.unread.discard(extent)
        if not run.unread:
            run.content = None
            self._kept.remove(run)
        return part

    def _begin(self, run: "_Run", stage: "_Stage") -> None:
        """Let the threads fill a buffer with a run."""
        run.begun = True
        run.stage = stage
        run.pieces = self._fill(stage, run.path, run.offset, run.size)
        self._filling.append(run)

    def _finish(self, run: "_Run") -> None:
        """Wait for the bytes of a run, and copy them to the device."""
        assert run.stage is not None
        content = torch.empty(run.size, dtype=torch.uint8, device=self._device)
        # The tensor with an error is read alone later, which raises it.
        with suppress(OSError, ValueError):
            self._upload(run.stage, run.pieces, content)
            run.content = content
            self._kept.append(run)
        if len(self._kept) > _KEPT:
            self._kept.popleft().content = None
        run.stage = None
        run.pieces = []

    def _free_stage(self) -> "_Stage":
        """Return a buffer, and wait until its last copy is complete."""
        if not self._stages and self._stages_made == _STAGES:
            self._finish(self._filling.popleft())
        if not self._stages:
            self._stages_made += 1
            return _Stage(self._device)
        stage = self._stages.popleft()
        if stage.copied is not None:
            stage.copied.synchronize()
        return stage

    def _fill(self, stage: "_Stage", path: Path, offset: int, size: int) -> list[Future[int]]:
        """Let the threads read bytes of a file into a buffer. Each piece returns its size."""
        view = memoryview(stage.content.numpy().data)[:size]
        return [
            self._pool.submit(_read, view[first : first + _PIECE], path, offset + first)
            for first in range(0, size, _PIECE)
        ]

    def _upload(self, stage: "_Stage", pieces: list[Future[int]], out: torch.Tensor) -> None:
        """Wait for the pieces, copy them to the start of `out`, and free the buffer.

        Raises OSError, ValueError."""
        # After an error, too, because the threads write to the buffer.
        wait(pieces)
        self._stages.append(stage)
        size = sum(piece.result() for piece in pieces)
        out[:size].copy_(stage.content[:size], non_blocking=True)
        if stage.copied is not None:
            stage.copied.record()


class _Stage:
    """Buffer in host memory, pinned for a GPU, with the event of its last copy."""

    def __init__(self, device: torch.device) -> None:
        gpu = device.type == "cuda"
        self.content = torch.empty(_STAGE, dtype=torch.uint8, pin_memory=gpu)
        self.copied: torch.cuda.Event | None = None
        if gpu:
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


class _Run:
    """Extents that are neighbors in a file and are read together."""

    def __init__(self, extent: Extent) -> None:
        self.path = extent.path
        self.offset = extent.offset
        self.size = extent.size
        self.unread = {extent}
        self.begun = False
        self.stage: _Stage | None = None
        self.pieces: list[Future[int]] = []
        self.content: torch.Tensor | None = None
        """Bytes on the device, until all extents are read."""

    def add(self, extent: Extent) -> bool:
        """Add the next extent of the file if there is room and no large hole."""
        hole = extent.offset - self.offset - self.size
        size = extent.offset + extent.size - self.offset
        if extent.path != self.path or not 0 <= hole <= _HOLE or size > _STAGE:
            return False
        self.size = size
        self.unread.add(extent)
        return True


def _runs(extents: Iterable[Extent]) -> list[_Run]:
    """Group neighbors. Extents that fill a buffer are left out, because they are large enough alone."""
    runs: list[_Run] = []
    for extent in sorted(extents):
        if 0 < extent.size < _STAGE and not (runs and runs[-1].add(extent)):
            runs.append(_Run(extent))
    return runs


def _read(out: memoryview, path: Path, offset: int) -> int:
    """Read a file from `offset` until `out` is full. Return the number of bytes."""
    size = len(out)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while out:
            count = file.readinto(out)
            if not count:
                raise ValueError("the file is too short")
            out = out[count:]
    return size
