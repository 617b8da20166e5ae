"""One packed copy to the device for each step: everything that a step says in whole numbers.

The host side is a ring of pinned buffers, one more than steps in flight, so that none is written while a
copy may still read it; the device side is one buffer at a fixed address, which captured graphs read too.
Steps follow each other on one stream, so a copy never overtakes the step that reads the last one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNED = 4
"""Words: every array begins at 16 bytes, since Triton compiles a kernel anew for one that does not."""

Values = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]


class BufferSlice(NamedTuple):
    """Where values lie: first word, how many values, whether they are 64 bits each."""

    at: int
    size: int
    wide: bool


class StepBuffer:
    """`words` of 32 bits at most in a step. On a CPU both sides are the same memory."""

    def __init__(self, words: int, buffers: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._hosts = [
            torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
            for _ in range(buffers if pinned else 1)
        ]
        self._arrays = [host.numpy() for host in self._hosts]
        self._device = self._hosts[0].to(device)
        self._turn = 0
        self._end = 0

    def begin(self) -> None:
        """The next step's values follow."""
        self._turn = (self._turn + 1) % len(self._hosts)
        self._end = 0

    def put(self, values: Values, *, wide: bool = False) -> BufferSlice:
        """Add values; where the device will find them."""
        at = self._end + -self._end % ALIGNED
        count = len(values)
        end = at + (2 * count if wide else count)
        whole = self._arrays[self._turn]
        assert end <= len(whole), f"a step of more than {len(whole)} words"
        if wide:
            whole[at:end].view(np.int64)[:] = values
        else:
            whole[at:end] = values
        self._end = end
        return BufferSlice(at, count, wide)

    def send(self) -> None:
        """Copy what was put. Asynchronous."""
        host = self._hosts[self._turn]
        if self._device is not host and self._end:
            self._device[: self._end].copy_(host[: self._end], non_blocking=True)

    def view(self, spot: BufferSlice) -> torch.Tensor:
        """The values on the device [count], int32 or int64; valid for this step."""
        if spot.wide:
            return self._device[spot.at : spot.at + 2 * spot.size].view(torch.int64)
        return self._device[spot.at : spot.at + spot.size]
