"""Host blocks: pages of KV in pinned host memory, copied beside the steps.

Copies run on a stream of their own. A step waits for those of the blocks that it is about to write or read, and
for no others, so saving blocks delays nobody. Each page goes through a contiguous buffer on the device, because
its layers lie far apart: one copy of megabytes instead of dozens of small ones.
"""

import mmap
from collections.abc import Iterable

import numpy as np
import torch

from localchat_cuda.runner.kv_pages import Pages

_PINNED_AT_ONCE = 1 << 28


class HostBlocks:
    """Host memory for `count` blocks of a page each. Everything but the bytes belongs to one thread."""

    def __init__(self, pages: Pages, count: int) -> None:
        """Raises OSError, RuntimeError where so much memory cannot be pinned."""
        self._pages = pages
        self._gpu = pages.device.type == "cuda"
        self._memory = mmap.mmap(-1, max(1, count * pages.page_bytes))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)  # pinned in a fifth of the time
        numbers = np.frombuffer(self._memory, np.uint8, count * pages.page_bytes)
        self._rows = torch.from_numpy(numbers).view(count, pages.page_bytes)
        self._pinned: list[int] = []
        self._copied: torch.cuda.Event | None = None
        """The latest copy between pages of the device, which a load may not overtake."""
        self._blocks: dict[int, torch.cuda.Event] = {}
        self._numbers: dict[int, torch.cuda.Event] = {}
        self._new_blocks: list[int] = []
        self._new_numbers: list[int] = []
        """Of the copies since the last event."""
        if self._gpu:
            self._pin()
            self._stream = torch.cuda.Stream(pages.device, priority=0)  # type: ignore[no-untyped-call]
            self._buffer = torch.empty(pages.page_bytes, dtype=torch.uint8, device=pages.device)

    def _pin(self) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        begin, end = self._rows.data_ptr(), self._rows.data_ptr() + self._rows.numel()
        for at in range(begin, end, _PINNED_AT_ONCE):
            error = cudart.cudaHostRegister(at, min(_PINNED_AT_ONCE, end - at), 0)
            if int(error):
                self.close()
                raise RuntimeError(f"cudaHostRegister: error {int(error)}")
            self._pinned.append(at)

    # ------------------------------------------------------------------------ copies

    def save(self, block: int, number: int) -> None:
        """Queue the copy of a block whose tokens are all computed."""
        if not self._gpu:
            self._pages.read(block, self._rows[number])
            return
        with torch.cuda.stream(self._stream):
            self._pages.read(block, self._buffer)
            self._rows[number].copy_(self._buffer, non_blocking=True)
        self._new_blocks.append(block)
        self._new_numbers.append(number)

    def load(self, number: int, block: int) -> None:
        """Queue the copy to a block that no launched step reads or writes."""
        if not self._gpu:
            self._pages.write(block, self._rows[number])
            return
        if self._copied is not None:
            self._stream.wait_event(self._copied)
            self._copied = None
        with torch.cuda.stream(self._stream):
            self._buffer.copy_(self._rows[number], non_blocking=True)
            self._pages.write(block, self._buffer)
        self._new_blocks.append(block)
        self._new_numbers.append(number)

    def copied(self) -> None:
        """Note that the current stream copied pages."""
        if self._gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait_for(self, blocks: Iterable[int]) -> None:
        """Have the current stream wait for the copies of these blocks."""
        if not self._gpu:
            return
        self.record()
        events = {id(event): event for block in blocks if (event := self._blocks.pop(block, None))}
        for event in events.values():
            torch.cuda.current_stream().wait_event(event)

    def record(self) -> None:
        """End the group of copies that are waited for together."""
        if not self._new_blocks:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._blocks.update(dict.fromkeys(self._new_blocks, event))
        self._numbers.update(dict.fromkeys(self._new_numbers, event))
        self._new_blocks, self._new_numbers = [], []

    # ------------------------------------------------------------------------ bytes

    def bytes_of(self, number: int) -> memoryview | None:
        """See backend_api.interface.HostBlockRunner."""
        event = self._numbers.get(number)
        if event is not None and not event.query():  # type: ignore[no-untyped-call]
            return None
        self._numbers.pop(number, None)
        size = self._pages.page_bytes
        return memoryview(self._memory)[number * size : (number + 1) * size]

    def close(self) -> None:
        """Unpin the memory. No copy is under way."""
        for at in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(at)  # type: ignore[no-untyped-call]
        self._pinned = []
