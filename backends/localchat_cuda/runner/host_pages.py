"""Host pages: blocks of KV in pinned host memory, copied beside the steps.

Copies run on a stream of their own. A step waits for those of the blocks that it is about to write or read, and
for no others, so saving blocks delays nobody. Pages go through a contiguous buffer on the device, because their
layers lie far apart: one copy of megabytes instead of dozens of small ones. Blocks that follow each other in
host memory are loaded together.
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
_TOUCHING_THREADS = 4
_LOADED_AT_ONCE = 1 << 24
"""Bytes of the buffer, but for larger blocks."""
_MEASURED_LOADS = 8


class HostMemory:
    """Memory for `count` blocks of `size` bytes, pinned in a thread: 0.2 to 0.6 s a GB.

    Most of that is for the system to find the memory. Other threads touch it first, in huge pages if there are
    any: the driver would hold a lock meanwhile, for which every copy of weights waits.

    A copy may not cross two areas that were pinned one after the other, so a block begins at a page of the
    system, and an area is some whole blocks.
    """

    def __init__(self, device: torch.device, size: int, count: int) -> None:
        """Raises OSError where there is no such memory."""
        self.size = size
        self._device = device
        self._stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, count * self._stride)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._content = np.frombuffer(self._memory, np.uint8).reshape(count, self._stride)
        self.content = torch.from_numpy(self._content)
        """uint8 (blocks, stride)"""
        self.rows = self.content[:, :size]
        self.area = max(1, _PINNED_AT_ONCE // self._stride)
        """Blocks of an area."""
        self._areas: list[int] = []
        self._error = 0
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=self._pin, name="pin", daemon=True)
            self._thread.start()

    def _pin(self) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(self._device)
        areas = np.split(self._content, range(self.area, len(self._content), self.area))
        with ThreadPoolExecutor(_TOUCHING_THREADS, "touch") as pool:
            for area in pool.map(_touched, areas):
                at = area.ctypes.data
                self._error = self._error or int(cudart.cudaHostRegister(at, area.nbytes, 0))
                if not self._error:
                    self._areas.append(at)

    def wait(self) -> None:
        """Wait until all is pinned. Raises RuntimeError where it cannot be."""
        if self._thread is not None:
            self._thread.join()
        if self._error:
            self.close()
            raise RuntimeError(f"cudaHostRegister gave error {self._error}")

    def view(self, number: int) -> memoryview:
        """The bytes of a block."""
        begin = number * self._stride
        return memoryview(self._memory)[begin : begin + self.size]

    def words_on_device(self) -> torch.Tensor:
        """The blocks as the device reads them where they lie: int64 (blocks, words), cut to whole words."""
        content = self._content if self._device.type == "cpu" else _Mapped(self._content)
        words = torch.as_tensor(content, device=self._device).view(torch.int64)
        return words[:, : self.size // 8]

    def close(self) -> None:
        """Unpin the memory. No copy is under way. Idempotent."""
        if self._thread is not None:
            self._thread.join()
        for at in self._areas:
            torch.cuda.cudart().cudaHostUnregister(at)  # type: ignore[no-untyped-call]
        self._areas = []


def _touched(area: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The area, with memory behind each of its pages."""
    area[:, :: mmap.PAGESIZE] = 0
    return area


class _Mapped:
    """Pinned memory as an array of the device: unified addressing gives both the same pointers."""

    def __init__(self, content: npt.NDArray[np.uint8]) -> None:
        self.__cuda_array_interface__ = content.__array_interface__ | {"version": 3}


def _runs(ordered: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as firsts and counts of those that follow each other."""
    starts = [at for at, number in enumerate(ordered) if not at or ordered[at - 1] != number - 1]
    for start, end in pairwise([*starts, len(ordered)]):
        yield ordered[start], end - start


class HostPages:
    """Copies between pages and host blocks. Used by one thread, and `sums_of` by another one."""

    def __init__(self, pages: Pages, memory: HostMemory) -> None:
        """Takes ownership of `memory`, whose blocks are pages of these."""
        assert memory.size == pages.page_bytes, "host blocks of another size"
        self._pages = pages
        self._memory = memory
        self._rows = memory.rows
        self._gpu = pages.device.type == "cuda"
        self._copied: torch.cuda.Event | None = None
        """The latest copy between pages of the device, which a load may not overtake."""
        self._blocks: dict[int, torch.cuda.Event] = {}
        self._numbers: dict[int, torch.cuda.Event] = {}
        self._new_blocks: list[int] = []
        self._new_numbers: list[int] = []
        """Of the copies since the last event."""
        self._loads: dict[int, int] = {}
        """Loads that are not yet queued: numbers of host blocks by block."""
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

    # ------------------------------------------------------------------------ copies

    def save(self, block: int, number: int) -> None:
        """Queue the copy of a block whose tokens are all computed."""
        self._queue_loads()
        with torch.cuda.stream(self._stream):
            content = self._buffer[0, : self._memory.size]
            self._pages.read(block, content)
            self._rows[number].copy_(content, non_blocking=True)
        self._new_blocks.append(block)
        self._new_numbers.append(number)

    def load(self, number: int, block: int) -> None:
        """Copy to a block that no launched step reads or writes, with the next copies or waits."""
        self._loads[block] = number

    def _queue_loads(self) -> None:
        if not self._loads:
            return
        loads = sorted((number, block) for block, number in self._loads.items())
        self._loads = {}
        numbers, blocks = ([each[part] for each in loads] for part in (0, 1))
        if self._stream is not None and self._copied is not None:
            self._stream.wait_event(self._copied)
            self._copied = None
        done = 0
        with torch.cuda.stream(self._stream):
            for first, count in _runs(numbers):
                for start, end in self._pieces(first, first + count):
                    rows = self._buffer[: end - start]
                    rows.copy_(self._memory.content[start:end], non_blocking=True)
                    self._pages.write(blocks[done : done + len(rows)], rows)
                    done += len(rows)
        self._new_blocks += blocks
        self._new_numbers += numbers

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What of these host blocks fits into the buffer and lies in one area."""
        while start < end:
            area_end = (start // self._memory.area + 1) * self._memory.area
            piece_end = min(end, area_end, start + len(self._buffer))
            yield start, piece_end
            start = piece_end

    def load_s(self, page: int) -> float:
        """Measure what loading a block takes, to a page that nobody reads; 0 on a CPU."""
        if not self._gpu:
            return 0.0
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self.load(0, page)
        self._queue_loads()
        begun.record(self._stream)
        for number in range(_MEASURED_LOADS):
            self.load(number % len(self._rows), page)
            self._queue_loads()
        ended.record(self._stream)
        ended.synchronize()
        self.record()
        self.sums_of((0,))  # the driver loads kernels where they are used first: 30 ms
        return float(begun.elapsed_time(ended)) / 1e3 / _MEASURED_LOADS

    def copied(self) -> None:
        """Note that the current stream copied pages."""
        if self._gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait_for(self, blocks: Iterable[int]) -> None:
        """Have the current stream wait for the copies of these blocks."""
        self.record()
        events = {id(event): event for block in blocks if (event := self._blocks.pop(block, None))}
        for event in events.values():
            torch.cuda.current_stream().wait_event(event)

    def record(self) -> None:
        """End the group of copies that are waited for together."""
        self._queue_loads()
        if not self._gpu or not self._new_blocks:
            self._new_blocks = []
            self._new_numbers = []
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._blocks.update(dict.fromkeys(self._new_blocks, event))
        self._numbers.update(dict.fromkeys(self._new_numbers, event))
        self._new_blocks = []
        self._new_numbers = []

    # ------------------------------------------------------------------------ bytes

    def bytes_of(self, number: int) -> memoryview | None:
        """See backend_api.kv_transfer.HostBlockRunner."""
        event = self._numbers.get(number)
        if event is not None and not event.query():  # type: ignore[no-untyped-call]
            return None
        self._numbers.pop(number, None)
        return self._memory.view(number)

    def sums_of(self, numbers: Sequence[int]) -> list[bytes]:
        """See backend_api.kv_transfer.HostBlockRunner.

        The device reads them where they lie: a CPU of many readers adds no faster than it reads files.
        """
        if not numbers:
            return []
        with torch.cuda.stream(self._sum_stream):
            runs = _runs(sorted(numbers))
            sums = torch.cat([self._sums(first, count) for first, count in runs]).cpu()
        places = np.argsort(np.argsort(numbers))
        rests = (payload_rest(self._memory.view(number)) for number in numbers)
        return [row.tobytes() + rest for row, rest in zip(sums.numpy()[places], rests, strict=True)]

    def _sums(self, first: int, count: int) -> torch.Tensor:
        """Queue the sums of blocks that follow each other: int64 (blocks, sums), which overflows as the sums'
        own words do."""
        sums = [self._words.new_empty((count, 0))]
        for start, end in chunks(self._memory.size):
            words = self._words[first : first + count, start // 8 : end // 8]
            grid = words.view(count, -1, *GROUP).sum(2)
            sums += [grid.sum(1), grid.sum(2)]
        return torch.cat(sums, 1)

    def close(self) -> None:
        """Give the memory back. No copy is under way."""
        self._memory.close()
