"""Further methods of runners whose KV leaves the device: it goes to the disk, and comes back."""

from collections.abc import Sequence
from typing import Protocol


class ExportingRunner(Protocol):
    """Further methods of a runner whose capabilities say what it `exports`.

    Called from the thread of `launch`, while no step is in flight. The bytes may only go back to a runner of
    the same model, build and KV type.
    """

    def export_slot(self, slot: int, start: int, end: int) -> memoryview:
        """KV of a slot's tokens from `start` to `end`; of `whole` states all of it."""
        ...

    def export_saved(self, key: int, start: int, end: int) -> memoryview | None:
        """The same of a state saved in host memory; None: there is no room to take it apart."""
        ...


class HostBlockRunner(Protocol):
    """Further methods of a runner whose capabilities have host blocks.

    The bytes may go to another process and come back in one of the same model, build and KV type.
    """

    def host_block(self, number: int) -> memoryview | None:
        """The bytes of a host block, to read and to write until a later plan names it.

        None: a copy of a launched plan still uses it. Called from the thread of `launch`; the bytes may be
        used by any.
        """
        ...

    def block_sums(self, numbers: Sequence[int]) -> list[bytes]:
        """The sums (kv_store/checksum.py) of host blocks that no plan names meanwhile.

        Called by one thread, another than that of `launch`. Raises RuntimeError where the device fails.
        """
        ...
