"""How an engine of our own is opened. Apart from the engine, so that settling a model loads none of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localchat.config.remotes import Remote

if TYPE_CHECKING:
    from localchat.fit.memory_plan import LoadWish


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load a model. None, 0 and `auto`: decide for this machine.

    model: a file or folder. name: what the user calls it. cache_ram_bytes: RAM for parked prefixes.
    require_gpu: refuse to load rather than compute on the CPU alone. sampling: defaults by name (the
    catalogue's or the user's), before the model's own. state_dir: where crashing builds are remembered.
    remote: a server elsewhere that answers instead; then nothing is loaded here.
    audit: check the KV books whenever idle (tests). gpu_limit_bytes, kv_limit_bytes, dummy_weights,
    head_int8: see fit.plan.LoadWish.
    """

    model: Path
    name: str = ""
    backend: str | None = None
    context_tokens: int | None = None
    kv_type: str | None = None
    gpu_layers: int | Literal["auto", "all"] = "auto"
    threads: int = 0
    max_slots: int = 16
    cache_ram_bytes: int | None = None
    speculation: bool = True
    require_gpu: bool = False
    sampling: dict[str, float] = field(default_factory=dict)
    state_dir: Path | None = None
    audit: bool = False
    remote: Remote | None = None
    gpu_limit_bytes: int | None = None
    kv_limit_bytes: int | None = None
    dummy_weights: bool = False
    head_int8: bool = False

    def load_wish(self) -> "LoadWish":
        """What a planner is asked before the load."""
        from localchat.fit.memory_plan import LoadWish

        return LoadWish(
            context_tokens=self.context_tokens,
            kv_type=self.kv_type,
            gpu_layers=self.gpu_layers,
            max_slots=self.max_slots,
            cache_ram_bytes=self.cache_ram_bytes,
            threads=self.threads,
            require_gpu=self.require_gpu,
            gpu_limit_bytes=self.gpu_limit_bytes,
            kv_limit_bytes=self.kv_limit_bytes,
            dummy_weights=self.dummy_weights,
            head_int8=self.head_int8,
        )
