"""Additional methods of runners whose KV can be stored on disk and loaded again."""

from collections.abc import Sequence
from typing import Protocol


class ExportingRunner(Protocol):
    """Additional methods of a runner that `exports` KV.

    Called from the thread of `launch`, while no step is in flight. Only a runner of the same model, build and
    KV type can import the bytes.
    """

    def export_slot(self, slot: int, start: int, end: int) -> memoryview:
        """Return the KV of a slot's tokens from `start` to `end`, or a `whole` state."""
        ...

    def export_saved(self, key: int, start: int, end: int) -> memoryview | None:
        """Return the same for a state saved in host memory. None: there is no room to unpack it."""
        ...


class HostBlockRunner(Protocol):
    """Additional methods of a runner with host blocks.

    Only a runner of the same model, build and KV type can use the bytes.
    """

    def host_block(self, number: int) -> memoryview | None:
        """Return the bytes of a host block. They are valid until a later plan uses the block.

        None: a copy of a launched plan still uses it. Called from the thread of `launch`. Any thread may use
        the bytes.
        """
        ...

    def block_sums(self, numbers: Sequence[int]) -> list[bytes]:
        """Return the checksums (kv_store/checksum.py) of host blocks that no plan uses meanwhile.

        Called by one thread other than that of `launch`. Raises RuntimeError if the device fails.
        """
        ...
