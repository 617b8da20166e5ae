"""Options of a model load: one record that engine options, frames and calls embed.

It belongs to `fit/`, the lowest package that reads it, because backends import no higher one.
`engine.options.load_options` creates it from the settings. A new option is a setting, a field of the same name
here, and its use in a planner or loader.
"""

from typing import Literal, TypeAlias

import msgspec

GpuLayers: TypeAlias = int | Literal["auto", "all"]
ExpertsOnCpu: TypeAlias = int | Literal["auto"]
GpuCount: TypeAlias = int | Literal["auto"]
RoundedType: TypeAlias = Literal["fp8", "int8", "int4"]

MAX_LORA_SCALE = 1000.0
"""Largest scale of a LoRA adapter. Huge ones overflow the model's numbers."""


class LoraAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter and its default scale."""

    path: str
    """GGUF file, or folder in the format of PEFT."""
    scale: float = 1.0

    @property
    def label(self) -> str:
        """Name for lists and records, such as `style.gguf:0.5`."""
        name = self.path.rpartition("/")[2]
        if self.scale == 1:
            return name
        return f"{name}:{self.scale:g}"


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of one load. A default (None, 0, `auto`, False) leaves the decision to the planner.

    Size: one field per load option of the command line.
    """

    context_tokens: int | None = None
    """Tokens of the longest sequence."""
    kv_type: str | None = None
    """Storage of the KV cache: f16, bf16, fp8, q8_0, q4_0."""
    gpu_layers: GpuLayers = "auto"
    """Layers on the GPU, from the last."""
    experts_on_cpu: ExpertsOnCpu = "auto"
    """Layers on the GPU whose experts stay in RAM, from the first."""
    threads: int = 0
    """Threads that compute. 0: one per physical core."""
    draft: str | None = None
    """File or folder of a draft model with the same vocabulary."""
    mmproj: str | None = None
    """File with the encoder of pictures or sound. None: the one beside the model. `none`: no encoder."""
    lora: tuple[LoraAdapter, ...] = ()
    """Adapters that requests can apply."""
    speculation: bool = True
    """Whether to load parts that only draft, such as a model's own prediction heads."""
    max_slots: int = 16
    """Sequences computed at once."""
    more_slots: bool = False
    """Whether to add slots if the memory has room for more, shorter sequences."""
    room_for_slots: bool = False
    """Whether the KV cache should have room for a full context in each slot."""
    single_request_tokens: int = 0
    """Tokens of prompt and answer if the load is for one request. Then loading fast matters most, and the
    default context has room for them if they fit."""
    cache_ram_bytes: int | None = None
    """RAM for prefixes that are swapped to the host."""
    require_gpu: bool = False
    """Whether to refuse the load rather than compute on the CPU alone."""
    gpus: GpuCount = 1
    """GPUs that compute every layer together (CUDA backend). `auto`: as few as have room."""
    gpu_limit_bytes: int | None = None
    """Memory limit for each GPU."""
    kv_limit_bytes: int | None = None
    """Memory limit for the KV cache."""
    dummy_weights: bool = False
    """Whether to use random weights, which measure speed without a model's files."""
    quantize: RoundedType | None = None
    """Type to which the layers of a floating checkpoint are rounded while they are read."""
    window_only: bool = False
    """Whether sliding-window layers store only their window in the KV cache."""
    anyway: bool = False
    """Whether to load a model that does not fit, without a reserve."""

    def over(self, base: "LoadOptions") -> "LoadOptions":
        """Return `base` with those options replaced that differ from the defaults here."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        changed = {
            name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)
        }
        return msgspec.structs.replace(base, **changed)


_DEFAULTS = LoadOptions()
