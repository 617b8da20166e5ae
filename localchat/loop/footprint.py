"""The memory that a loaded model takes of this process, by the parts that a plan has."""

from typing import TypeAlias

from localchat.fit.plan import MemoryPlan
from localchat.loop.backend import MemoryReport

Parts: TypeAlias = tuple[int, int, int, int]
"""Weights, KV, compute buffers, overhead: bytes, -1 where one cannot be known."""


def planned(plan: MemoryPlan) -> Parts:
    """The parts of a plan, with file pages that nobody needs and the system still holds."""
    weights = plan.weights_bytes + plan.mapped_bytes
    return weights, plan.kv_bytes, plan.compute_bytes, plan.overhead_bytes


def footprint(report: MemoryReport, plan: MemoryPlan, before_bytes: int) -> Parts:
    """The same parts as they are now: buffers as the runner knows them, and as overhead what this process
    held before its load (`before_bytes`: interpreter, libraries, vocabulary) with what the runner keeps
    besides. Buffers count whole, also where no page of them was touched yet. With layers on a GPU the overhead
    is not known: its runtime keeps memory on the card."""
    weights, kv, compute, other = report
    if plan.gpu_layers:
        return weights, kv, compute, -1
    return weights, kv, compute, before_bytes + max(other, 0)


def resident_bytes() -> int:
    """RAM of this process, files mapped into it included."""
    import psutil

    return int(psutil.Process().memory_info().rss)
