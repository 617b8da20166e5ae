"""Host pages: blocks of KV in pinned host memory, copied in parallel with the steps.

Copies run on a separate stream. A step waits only for copies of the blocks that it writes or reads, so saving
blocks delays no step. Pages pass through a contiguous buffer on the device, because their layers are far apart.
That makes one copy of megabytes instead of dozens of small ones. Consecutive blocks in host memory are loaded
together.
"""

import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from localchat.kv_store.checksum import GROUP, chunks, payload_rest
from localchat_cuda.runner.kv_pages import Pages

_PINNED_AT_ONCE = 1 << 28
"""Bytes of an area that is pinned by one call."""
_TOUCHING_THREADS = 4
_LOADED_AT_ONCE = 1 << 24
"""Bytes of the buffer, unless one block is larger."""
_MEASURED_LOADS = 8


class HostMemory:
    """Memory for `count` blocks of `size` bytes. A thread pins it at 0.2 to 0.6 s/GB.

    Most of that time, the system searches for free memory. Other threads touch the memory first, with huge
    pages if available, because the driver would hold a lock for which every copy of weights waits.

    A copy must not cross two areas that were pinned by different calls. So a block starts at a page of the
    system, and an area consists of whole blocks. Several ranks map one file, so that a block has the parts of
    all of them."""

    def __init__(self, device: torch.device, size: int, count: int, file: int = -1) -> None:
        """Reserve the memory. Raises OSError if it is not available.

        `file`: descriptor of memory that other ranks map, too, of `length_of` bytes; -1: own memory."""
        self.size = size
        self._device = device
        self._stride = _stride_of(size)
        self._memory = mmap.mmap(file, count * self._stride)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Some kernels do not support huge pages.
            with suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._content = np.frombuffer(self._memory, np.uint8).reshape(count, self._stride)
        self.content = torch.from_numpy(self._content)
        """Blocks, uint8 [blocks, stride]."""
        self.rows = self.content[:, :size]
        self.area = max(1, _PINNED_AT_ONCE // self._stride)
        """Blocks of an area."""
        self._areas: list[int] = []
        self._error = 0
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=self._pin, name="pin", daemon=True)
            self._thread.start()

    @staticmethod
    def length_of(size: int, count: int) -> int:
        """Return the bytes of memory for `count` blocks of `size` bytes."""
        return count * _stride_of(size)

    def _pin(self) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(self._device)
        areas = np.split(self._content, range(self.area, len(self._content), self.area))
        with ThreadPoolExecutor(_TOUCHING_THREADS, "touch") as pool:
            for area in pool.map(_touched, areas):
                address = area.ctypes.data
                if not self._error:
                    self._error = int(cudart.cudaHostRegister(address, area.nbytes, 0))
                if not self._error:
                    self._areas.append(address)

    def wait(self) -> None:
        """Wait until the memory is pinned. Raises RuntimeError on failure."""
        if self._thread is not None:
            self._thread.join()
        if self._error:
            self.close()
            raise RuntimeError(f"cudaHostRegister returned error {self._error}")

    def view(self, number: int) -> memoryview:
        """Return the bytes of a block."""
        begin = number * self._stride
        return memoryview(self._memory)[begin : begin + self.size]

    def words_on_device(self) -> torch.Tensor:
        """Return the blocks as the device reads them in place: int64 [blocks, whole words]."""
        content: npt.NDArray[np.uint8] | _Mapped = self._content
        if self._device.type != "cpu":
            content = _Mapped(self._content)
        words = torch.as_tensor(content, device=self._device).view(torch.int64)
        return words[:, : self.size // 8]

    def close(self) -> None:
        """Unpin the memory. Copies must be complete. Idempotent."""
        if self._thread is not None:
            self._thread.join()
        for address in self._areas:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._areas = []


def _stride_of(size: int) -> int:
    """Return the distance between blocks."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _touched(area: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Touch each page of an area, so that the system allocates it."""
    area[:, :: mmap.PAGESIZE] = 0
    return area


class _Mapped:
    """Pinned memory as an array of the device. Unified addressing uses the same pointers for both."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self.__cuda_array_interface__ = content.__array_interface__ | {"version": 3}


def _runs(ordered: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the length of each run of consecutive numbers."""
    starts = [
        index
        for index, number in enumerate(ordered)
        if not index or ordered[index - 1] != number - 1
    ]
    for start, end in pairwise([*starts, len(ordered)]):
        yield ordered[start], end - start


class HostPages:
    """Copies between pages and host blocks. One thread uses it, and a second one may call `sums_of`."""

    def __init__(self, pages: Pages, memory: HostMemory, rank: int = 0) -> None:
        """Take ownership of `memory`, whose blocks have the size of these pages.

        `rank`: number of these pages among those of several ranks, which a block has one after the other."""
        size = pages.page_bytes
        assert memory.size % size == 0, "host blocks of another size"
        assert rank < memory.size // size, "host blocks of another size"
        self._pages = pages
        self._memory = memory
        self._size = size
        self._alone = memory.size == size
        self._rows = memory.content[:, rank * size : (rank + 1) * size]
        self._gpu = pages.device.type == "cuda"
        self._copied: torch.cuda.Event | None = None
        """Event of the latest copy between pages. Loads must not overtake it."""
        self._blocks: dict[int, torch.cuda.Event] = {}
        self._numbers: dict[int, torch.cuda.Event] = {}
        self._new: list[tuple[int, int]] = []
        """Copies since the last event: host block, and block."""
        self._loads: dict[int, int] = {}
        """Loads that are not queued yet: host block by block."""
        self._words = memory.words_on_device()
        self._stream: torch.cuda.Stream | None = None
        self._sum_stream: torch.cuda.Stream | None = None
        stride = memory.content.shape[1]
        self._buffer = torch.empty(
            max(1, _LOADED_AT_ONCE // stride), stride, dtype=torch.uint8, device=pages.device
        )
        if self._gpu:
            self._stream = torch.cuda.Stream(pages.device)  # type: ignore[no-untyped-call]
            self._sum_stream = torch.cuda.Stream(pages.device)  # type: ignore[no-untyped-call]

    def save(self, block: int, number: int) -> None:
        """Queue the copy of a complete block to a host block."""
        self._queue_loads()
        with torch.cuda.stream(self._stream):
            content = self._buffer[0, : self._size]
            self._pages.read(block, content)
            self._rows[number].copy_(content, non_blocking=True)
        self._new.append((number, block))

    def load(self, number: int, block: int) -> None:
        """Load a block that no launched step uses. The next copy or wait queues it."""
        self._loads[block] = number

    def _queue_loads(self) -> None:
        if not self._loads:
            return
        loads = sorted((number, block) for block, number in self._loads.items())
        self._loads = {}
        numbers = [number for number, _ in loads]
        blocks = [block for _, block in loads]
        if self._stream is not None and self._copied is not None:
            self._stream.wait_event(self._copied)
            self._copied = None
        done = 0
        with torch.cuda.stream(self._stream):
            for first, count in _runs(numbers):
                for start, end in self._pieces(first, first + count):
                    rows = self._buffer[: end - start]
                    if self._alone:
                        rows.copy_(self._memory.content[start:end], non_blocking=True)
                    else:
                        rows[0, : self._size].copy_(self._rows[start], non_blocking=True)
                    self._pages.write(blocks[done : done + len(rows)], rows)
                    done += len(rows)
        self._new += loads

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Split a range of host blocks by area and by the size of the buffer."""
        while start < end:
            area_end = (start // self._memory.area + 1) * self._memory.area
            # Parts of several ranks lie apart, so each block is a copy of its own.
            limit = 1
            if self._alone:
                limit = len(self._buffer)
            piece_end = min(end, area_end, start + limit)
            yield start, piece_end
            start = piece_end

    def synchronize(self) -> None:
        """Wait for all queued copies."""
        self._queue_loads()
        if self._stream is not None:
            self._stream.synchronize()

    def load_s(self, page: int) -> float:
        """Measure the seconds of loading a block to an unused page; 0 on a CPU."""
        if not self._gpu:
            return 0.0
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.load(0, page)
        self._queue_loads()
        start.record(self._stream)
        for number in range(_MEASURED_LOADS):
            self.load(number % len(self._rows), page)
            self._queue_loads()
        end.record(self._stream)
        end.synchronize()
        self.record()
        # The driver loads kernels at their first use, which takes 30 ms.
        self.sums_of((0,))
        return float(start.elapsed_time(end)) / 1e3 / _MEASURED_LOADS

    def copied(self) -> None:
        """Record that the current stream copied pages."""
        if self._gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait_for(self, blocks: Iterable[int]) -> None:
        """Make the current stream wait for the copies of these blocks."""
        self.record()
        # Blocks that were copied together share an event.
        events = {id(event): event for block in blocks if (event := self._blocks.pop(block, None))}
        for event in events.values():
            torch.cuda.current_stream().wait_event(event)

    def record(self) -> None:
        """Finish a group of copies that share an event."""
        self._queue_loads()
        new = self._new
        self._new = []
        if not self._gpu or not new:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._blocks.update((block, event) for _, block in new)
        self._numbers.update((number, event) for number, _ in new)

    def bytes_of(self, number: int) -> memoryview | None:
        """See backend_api.kv_transfer.HostBlockRunner."""
        event = self._numbers.get(number)
        if event is not None and not event.query():  # type: ignore[no-untyped-call]
            return None
        self._numbers.pop(number, None)
        return self._memory.view(number)

    def sums_of(self, numbers: Sequence[int]) -> list[bytes]:
        """See backend_api.kv_transfer.HostBlockRunner.

        The device reads the blocks in place. A busy CPU sums no faster than it reads files."""
        if not numbers:
            return []
        with torch.cuda.stream(self._sum_stream):
            runs = _runs(sorted(numbers))
            sums = torch.cat([self._sums(first, count) for first, count in runs]).cpu()
        ranks = np.argsort(np.argsort(numbers))
        tails = (payload_rest(self._memory.view(number)) for number in numbers)
        return [row.tobytes() + tail for row, tail in zip(sums.numpy()[ranks], tails, strict=True)]

    def _sums(self, first: int, count: int) -> torch.Tensor:
        """Queue the sums of consecutive blocks: int64 [blocks, sums], with the overflow of the format."""
        sums = [self._words.new_empty((count, 0))]
        for start, end in chunks(self._memory.size):
            words = self._words[first : first + count, start // 8 : end // 8]
            grid = words.view(count, -1, *GROUP).sum(2)
            sums += [grid.sum(1), grid.sum(2)]
        return torch.cat(sums, 1)

    def close(self) -> None:
        """Free the memory. Copies must be complete."""
        self._memory.close()
