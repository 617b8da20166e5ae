"""Order in which kernels are compiled."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

FEW_ROWS = 8
"""Row limit of Phase.FEW_ROWS."""
SHORT_PROMPT = 16
"""Token limit of Phase.SHORT_PROMPT."""


class Phase(IntEnum):
    """Steps whose kernels are compiled together, in this order."""

    ONE_ROW = 0
    """A single sequence without drafts."""
    SHORT_PROMPT = 1
    """A single sequence with a prompt of 2 to `SHORT_PROMPT` tokens.

    Its gemms are those of as many sequences, which compile longest. Few first prompts are so short."""
    FEW_ROWS = 2
    """Up to `FEW_ROWS` sequences, and drafts."""
    ALL = 3

    @staticmethod
    def of(widths: Sequence[int], *, drafts: bool) -> "Phase":
        """Return the phase that compiles the kernels of a step. `widths`: tokens of its sequences."""
        if len(widths) <= 1 and not drafts:
            is_short = any(1 < width <= SHORT_PROMPT for width in widths)
            return Phase.SHORT_PROMPT if is_short else Phase.ONE_ROW
        if len(widths) <= FEW_ROWS:
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
