"""Options of a model load, as one record that everything from flag to loader embeds.

Stands in `fit/`, the lowest package that reads it, because backends import no higher one. Engine options,
frames and calls embed it; `engine.options.load_options` makes it of the settings. A new option is a setting,
a field of the same name here, and its use in a planner or loader.
"""

from typing import Literal, TypeAlias

import msgspec

GpuLayers: TypeAlias = int | Literal["auto", "all"]
ExpertsOnCpu: TypeAlias = int | Literal["auto"]
RoundedType: TypeAlias = Literal["fp8", "int8", "int4"]


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of one load. A default (None, 0, `auto`, False) leaves the decision to the planner."""

    context_tokens: int | None = None
    """Longest sequence."""
    kv_type: str | None = None
    """Storage of the KV cache: f16, bf16, fp8, q8_0, q4_0."""
    gpu_layers: GpuLayers = "auto"
    """Layers on the GPU, counted from the last."""
    experts_on_cpu: ExpertsOnCpu = "auto"
    """Layers whose experts stay in RAM although the layer is on the GPU, counted from the first."""
    threads: int = 0
    """Threads that compute; 0: the physical cores."""
    draft: str | None = None
    """File or folder of a small model of the same vocabulary that drafts."""
    speculation: bool = True
    """False: load nothing that only drafts, such as a model's own prediction heads."""
    max_slots: int = 16
    """Sequences computed at once."""
    more_slots: bool = False
    """Compute more at once where the memory for so many has room for shorter ones."""
    room_for_slots: bool = False
    """Give the KV cache room for a full context in each slot, as far as memory allows."""
    one_answer: bool = False
    """The load is for one answer: a backend that loads sooner goes before one that writes faster."""
    cache_ram_bytes: int | None = None
    """RAM for prefixes that are swapped to the host."""
    require_gpu: bool = False
    """Refuse the load rather than compute on the CPU alone."""
    gpu_limit_bytes: int | None = None
    """Most memory taken of each GPU."""
    kv_limit_bytes: int | None = None
    """Memory limit for the KV cache."""
    dummy_weights: bool = False
    """Random weights, to measure speed without a model's files."""
    head_int8: bool = False
    """Round the output head to 8 bits."""
    quantize: RoundedType | None = None
    """Round the layers of a floating checkpoint while they are read."""
    window_only: bool = False
    """Layers with a sliding window keep only their window in the KV cache."""
    anyway: bool = False
    """Load even where the plan does not fit, and keep nothing in reserve."""

    def over(self, base: "LoadOptions") -> "LoadOptions":
        """These options where they differ from the defaults, and those of `base` elsewhere."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        changed = {
            name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)
        }
        return msgspec.structs.replace(base, **changed)


_DEFAULTS = LoadOptions()
