"""The memory that a loaded model takes of this process, by the parts that its plan has."""

from collections.abc import Callable

from localchat.engine.engine import MemoryParts
from localchat.fit.compare import surprise
from localchat.fit.plan import MemoryPlan
from localchat.loop.backend import MemoryReport


class Footprint:
    """Made between plan and load, measured after the load. `actual` is None until then."""

    def __init__(self, plan: MemoryPlan) -> None:
        self._offloads = bool(plan.gpu_layers)
        self._before_bytes = _resident_bytes()
        # File pages that nobody needs any more are still held.
        self.predicted = MemoryParts(
            plan.weights_bytes + plan.mapped_bytes,
            plan.kv_bytes,
            plan.compute_bytes,
            plan.overhead_bytes,
        )
        self.actual: MemoryParts | None = None

    @property
    def actual_bytes(self) -> int:
        """What is known of the parts, together; 0 before the load."""
        return sum(max(0, part) for part in _parts(self.actual)) if self.actual else 0

    def measure(self, report: MemoryReport, say: Callable[[str], None]) -> None:
        """The parts as they are: buffers as the runner knows them, whole, also where no page of them was
        touched yet; as overhead what this process held before the load (interpreter, libraries, vocabulary)
        with what the runner keeps besides. With layers on a GPU the overhead is not known: its runtime keeps
        memory on the card. `say` gets a sentence where the plan was far off."""
        weights, kv, compute, other = report
        overhead = -1 if self._offloads else self._before_bytes + max(other, 0)
        self.actual = MemoryParts(weights, kv, compute, overhead)
        if sentence := surprise(_parts(self.predicted), _parts(self.actual)):
            say(sentence)


def _parts(found: MemoryParts) -> tuple[int, int, int, int]:
    return found.weights_bytes, found.kv_bytes, found.compute_bytes, found.overhead_bytes


def _resident_bytes() -> int:
    """RAM of this process, files mapped into it included."""
    import psutil

    return int(psutil.Process().memory_info().rss)
