"""What a load takes and whether it fits: formulas stand here once; each backend's plan.py adds its buffers."""

from dataclasses import dataclass
from typing import Literal

GpuLayers = int | Literal["auto", "all"]


@dataclass(frozen=True, slots=True)
class LoadWish:
    """What the user asked of a load; None and `auto`: decide for the machine.

    context_tokens: longest sequence. kv_type: f16, q8_0, q4_0, ... max_slots: sequences at once.
    cache_ram_bytes: RAM for parked prefixes.
    """

    context_tokens: int | None = None
    kv_type: str | None = None
    gpu_layers: GpuLayers = "auto"
    max_slots: int = 16
    cache_ram_bytes: int | None = None
    threads: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The verdict before a load, all sizes in bytes of the memory that bounds it.

    max_context_tokens: the largest context that fits with this KV type. advice: what would help, best
    first. notes: what was decided, in sentences, for the user.
    """

    backend: str
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    overhead_bytes: int
    free_bytes: int
    fits: bool
    context_tokens: int
    max_context_tokens: int
    kv_type: str
    flash_attention: bool
    gpu_layers: int
    cache_ram_bytes: int
    max_step_tokens: int
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Everything that will be taken."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.overhead_bytes
