"""Order in which kernels are compiled."""

from enum import IntEnum
from typing import Protocol

FEW_ROWS = 8
"""Row limit of Phase.FEW_ROWS."""


class Phase(IntEnum):
    """Steps whose kernels are compiled together, in this order."""

    ONE_ROW = 0
    """A single sequence without drafts."""
    FEW_ROWS = 1
    """Up to `FEW_ROWS` sequences, and drafts."""
    ALL = 2

    @staticmethod
    def of(rows: int, *, drafts: bool) -> "Phase":
        """Return the phase that compiles the kernels of a step with this number of sequences."""
        if rows <= 1 and not drafts:
            return Phase.ONE_ROW
        if rows <= FEW_ROWS:
            return Phase.FEW_ROWS
        return Phase.ALL


def phase_line(phase: Phase, *, ok: bool) -> str:
    """Return the line with which a process reports the end of a phase."""
    return f"{phase.name}\n" if ok else f"{phase.name} failed\n"


class KernelCompilation(Protocol):
    """Kernels that other processes compile; see workers.CompileAhead."""

    def finished(self) -> bool:
        """Return True once all kernels are compiled, or will be on first use."""
        ...

    def reached(self, phase: Phase) -> bool:
        """Return True once the kernels of a phase and of earlier ones are compiled."""
        ...

    def hurry(self) -> None:
        """Start to compile now, although the program may soon end."""
        ...

    def wait(self, phase: Phase) -> None:
        """Wait until the kernels of a phase and of earlier ones are compiled."""
        ...

    def idle(self, seconds: float) -> None:
        """Let time pass while nothing else is to do. Returns early once all kernels are compiled."""
        ...

    def stop(self) -> None:
        """End the processes. Idempotent."""
        ...
