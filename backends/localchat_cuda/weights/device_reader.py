"""Reads parts of files to a device, as fast as the file cache or the disk gives them.

One thread copies 1 GB a second from mapped pages, as each page is a fault of its own; eight threads that read
large pieces into pinned memory reach 30.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Final

import torch

_THREADS: Final = 8
_PIECE: Final = 4 << 20
"""Bytes that a thread reads at once."""
_STAGE: Final = 64 << 20
"""Bytes of pinned memory that are read while others are copied to the device."""


class DeviceReader:
    """Reads for one load. Its threads end with it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights")
        self._stages: Iterator[_Stage] | None = None

    def read(self, path: Path, offset: int, size: int) -> torch.Tensor:
        """`size` bytes of a file from `offset`, uint8 on the device. Raises OSError, ValueError if the file is
        shorter."""
        out = torch.empty(size, dtype=torch.uint8, device=self._device)
        if self._device.type != "cuda":
            self._fill(out, path, offset)
            return out
        if self._stages is None:
            self._stages = cycle([_Stage(), _Stage()])
        for first in range(0, size, _STAGE):
            part = out[first : first + _STAGE]
            stage = next(self._stages)
            stage.copied.synchronize()
            self._fill(stage.content[: len(part)], path, offset + first)
            part.copy_(stage.content[: len(part)], non_blocking=True)
            stage.copied.record()
        return out

    def _fill(self, out: torch.Tensor, path: Path, offset: int) -> None:
        view = memoryview(out.numpy().data)

        def fill(first: int) -> None:
            _read(view[first : first + _PIECE], path, offset + first)

        for _ in self._pool.map(fill, range(0, len(view), _PIECE)):
            pass  # an error is raised here


class _Stage:
    """Pinned memory, and when it was copied last."""

    def __init__(self) -> None:
        self.content = torch.empty(_STAGE, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


def _read(out: memoryview, path: Path, offset: int) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while out:
            count = file.readinto(out)
            if not count:
                raise ValueError("the file ends before it")
            out = out[count:]
