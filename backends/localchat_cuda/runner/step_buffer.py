"""Copies all integers of a step to the device at once.

The host side is a ring of pinned buffers, one more than steps in flight, so that no buffer is written while a
copy may still read it. The device side is one buffer at a fixed address, which captured graphs read, too. Steps
run on one stream, so a copy never overtakes the step that reads the previous one. An array that does not fit in
the buffer gets its own memory, so that no request makes a step too long.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNED_WORDS = 4
"""Arrays are aligned to 16 bytes, because Triton compiles another kernel for unaligned ones."""

Values = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy values from the host to a device. The host does not wait for the copy."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class BufferSlice(NamedTuple):
    """Array of a step; `view` returns it on the device."""

    device: torch.Tensor
    """Buffer on the device, int32; for an array that did not fit, the array alone."""
    start: int
    """First word."""
    size: int
    """Number of values."""
    int64: bool
    """Values take two words each."""

    def view(self) -> torch.Tensor:
        """Return the values on the device [size], int32 or int64.

        They are valid for this step, once the buffer is sent."""
        if self.int64:
            return self.device[self.start : self.start + 2 * self.size].view(torch.int64)
        return self.device[self.start : self.start + self.size]


class StepBuffer:
    """Collect the arrays of one step on the host. On a CPU both sides are the same memory."""

    def __init__(self, words: int, buffers: int, device: torch.device) -> None:
        """`words`: capacity in 32-bit words. `buffers`: size of the ring of host buffers."""
        self._pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(words, dtype=torch.int32, pin_memory=self._pinned)
            for _ in range(buffers if self._pinned else 1)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._device = self._hosts[0].to(device)
        self._current = 0
        self._end = 0

    def begin_step(self) -> None:
        """Switch to the next host buffer, and empty it."""
        self._current = (self._current + 1) % len(self._hosts)
        self._end = 0

    def write(self, values: Values, *, int64: bool = False) -> BufferSlice:
        """Append an array to the step.

        Write arrays that captured graphs read first, because those always fit."""
        start = self._end + -self._end % ALIGNED_WORDS
        count = len(values)
        words_per_value = 2 if int64 else 1
        end = start + words_per_value * count
        words = self._arrays[self._current]
        if end > len(words):
            return self._write_apart(values, int64=int64)
        if int64:
            words[start:end].view(np.int64)[:] = values
        else:
            words[start:end] = values
        self._end = end
        return BufferSlice(self._device, start, count, int64)

    def _write_apart(self, values: Values, *, int64: bool) -> BufferSlice:
        """Send an array by itself. torch reuses its pinned memory only after the copy."""
        host = torch.from_numpy(np.array(values, np.int64 if int64 else np.int32))
        device_array = upload(host, self._device.device)
        return BufferSlice(device_array.view(torch.int32), 0, len(values), int64)

    @property
    def words(self) -> NDArray[np.int32]:
        """Everything that the step has written so far, on the host."""
        return self._arrays[self._current][: self._end]

    def fill(self, count: int) -> NDArray[np.int32]:
        """Return the first `count` words of an empty buffer, which the caller fills."""
        assert not self._end
        self._end = count
        return self.words

    def holds(self, written: BufferSlice) -> bool:
        """Return whether an array fitted in the buffer."""
        return written.device is self._device

    def send(self) -> None:
        """Copy the written arrays to the device asynchronously."""
        host = self._hosts[self._current]
        if self._device is not host and self._end:
            self._device[: self._end].copy_(host[: self._end], non_blocking=True)
