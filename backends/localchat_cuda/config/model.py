"""Shape of a model as the engine runs it. Imports no torch."""

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from localchat.errors import UsageError
from localchat.fit.load_options import RoundedType
from localchat.model_files.safetensors import Tensor
from localchat_cuda.architectures.family import Family
from localchat_cuda.config.gemma import GemmaLayers
from localchat_cuda.config.latent import LatentAttention
from localchat_cuda.config.mixture import EXPERT_FORMS, Mixture
from localchat_cuda.config.quantization import Quantization, floating_bytes, rounding
from localchat_cuda.config.recurrent import Recurrent
from localchat_cuda.config.rope import Rotation

Activation = Literal["silu", "gelu_tanh", "relu2"]
FloatType = Literal["bfloat16", "float16", "float32"]

PAGE_TOKENS = 64
"""Tokens of a page of the KV cache."""
HYBRID_FORMS = "delta nets support bf16, fp16 and 4-bit integers"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder of the Llama family.

    Size: the record describes all supported families, and layers, loader and memory plan ask it by layer."""

    family: Family = field(repr=False)
    """Not shown, because its functions print addresses that differ from process to process."""
    layers: int
    hidden: int
    """Columns of the residual."""
    intermediate: int
    """Columns inside the MLP, or one expert."""
    heads: int
    """Heads of queries."""
    key_heads: int
    """Heads of keys and values."""
    head_dim: int
    vocabulary: int
    """Rows of the embedding."""
    context_train: int
    eps: float
    rotation: Rotation
    windowed_rotation: Rotation | None
    """Rotation of layers with a window, if it differs."""
    tied: bool
    """The embedding is also the head."""
    qkv_bias: bool
    quantization: Quantization | None
    """Number format of the layers; None: floating."""
    dtype: FloatType
    windows: tuple[int, ...] = ()
    """Keys that a query sees in each layer; 0: all."""
    attention_scale: float = 0.0
    """Scale of the attention's logits; 0.0: 1/sqrt(head_dim)."""
    attention_cap: float = 0.0
    """The attention's logits become cap * tanh(logit / cap); 0.0: no cap."""
    head_cap: float = 0.0
    """Soft cap of the head's logits, likewise."""
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    """Factor of the rows of the embedding."""
    vision: bool = False
    """The checkpoint has a part for images, which is not loaded."""
    context_capped: bool = False
    """Beyond `context_train`, attention would need a scale by position, which no kernel here has."""
    mixture: Mixture | None = None
    """Experts of the feed-forward layers; None: all are dense."""
    unrotated: tuple[bool, ...] = ()
    """Whether each layer skips the rotation; empty: all layers rotate queries and keys."""
    logits_divisor: float = 1.0
    """Divisor of the head's logits."""
    recurrent: Recurrent | None = None
    """Layers of a hybrid that have a running state instead of attention; None: all have attention."""
    feeds: tuple[bool, ...] = ()
    """Whether each layer is only a feed-forward layer, and the others only attention or a state.

    Empty: all layers have both."""
    latent: LatentAttention | None = None
    """Widths of multi-head latent attention, whose keys are one head of latents."""
    gemma: GemmaLayers | None = None
    """Layers of a Gemma 4. The other fields then describe the layers with a window."""
    ranks: int = 1
    """Processes that compute the model together. Heads and columns inside layers are those of one rank."""

    @property
    def architecture(self) -> str:
        """Name of the family."""
        return self.family.name

    @property
    def vocabulary_part(self) -> int:
        """Rows of the embedding and of the head that one rank stores. The last rank may have padding."""
        return -(-self.vocabulary // self.ranks)

    def window(self, layer: int) -> int:
        """Return the number of keys that a query of a layer sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    def is_recurrent(self, layer: int) -> bool:
        """Return True if a layer has a running state instead of attention."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    def has_feed(self, layer: int) -> bool:
        """Return True if a layer has an MLP or experts."""
        return not self.feeds or self.feeds[layer]

    def has_attention(self, layer: int) -> bool:
        """Return True if a layer has attention."""
        return not (self.is_recurrent(layer) or (self.feeds and self.feeds[layer]))

    def head_dim_of(self, layer: int) -> int:
        """Return the columns of a head in a layer."""
        if self.gemma is not None and self.gemma.full[layer]:
            return self.gemma.head_dim
        return self.head_dim

    def value_dim_of(self, layer: int) -> int:
        """Return the columns of a head of values in the KV cache of a layer."""
        if self.latent is None:
            return self.head_dim_of(layer)
        return self.latent.kv_rank

    def table_dim_of(self, layer: int) -> int:
        """Return the columns of a head in a layer's table of rotations."""
        if self.latent is None:
            return self.head_dim_of(layer)
        return self.latent.rope

    def has_experts(self, layer: int) -> bool:
        """Return True if experts are the feed-forward layer, or a part of it."""
        if self.mixture is None or not self.has_feed(layer):
            return False
        return not self.mixture.dense or not self.mixture.dense[layer]

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(map(self.has_experts, range(self.layers)))

    def key_heads_of(self, layer: int) -> int:
        """Return the heads of keys and values that a layer reads."""
        if self.gemma is not None and self.gemma.full[layer]:
            return self.gemma.key_heads
        return self.key_heads

    def intermediate_of(self, layer: int) -> int:
        """Return the columns inside the MLP of a layer."""
        if self.gemma is not None:
            return self.gemma.intermediates[layer]
        if self.mixture is not None and not self.has_experts(layer):
            return self.mixture.dense_columns
        return self.intermediate

    def qkv_heads(self, layer: int) -> tuple[int, ...]:
        """Return the heads of each projection that a layer merges into one gemm.

        The projections are queries, with the gates of a hybrid, and the layer's keys and values."""
        projections = 2
        if self.gemma is not None:
            projections = self.gemma.projections(layer)
        queries = self.heads
        if self.family.has_delta_nets:
            queries *= 2
        return queries, *(self.key_heads_of(layer),) * projections

    def kv_source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads. Only layers of a Gemma 4 read others."""
        if self.gemma is None:
            return layer
        return self.gemma.source(layer)

    def rotation_of(self, layer: int) -> Rotation | None:
        """Return the rotation of a layer; None: the layer does not rotate queries and keys."""
        if self.unrotated and self.unrotated[layer]:
            return None
        if self.windowed_rotation is not None and self.window(layer):
            return self.windowed_rotation
        return self.rotation

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers with keys and values of their own."""
        return tuple(
            n for n in range(self.layers) if self.has_attention(n) and self.kv_source(n) == n
        )

    @property
    def last_mixer(self) -> int:
        """Last layer with attention or a running state. After it, rows without logits are not needed."""
        return max(n for n in range(self.layers) if not self.feeds or not self.feeds[n])

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's running state in all layers."""
        if self.recurrent is None:
            return 0
        return self.recurrent.state_bytes(self.float_bytes)

    @property
    def float_bytes(self) -> int:
        """Bytes of one floating number of the model."""
        if self.dtype == "float32":
            return 4
        return 2

    def loaded_bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a stored tensor once loaded."""
        if self.quantization is None:
            return floating_bytes(tensor, self.float_bytes)
        return self.quantization.loaded_bytes(tensor, self.float_bytes)

    @property
    def fp8_activations(self) -> bool:
        """True if gemms of many rows may round their activations to 8 bits."""
        return self.quantization is not None and self.quantization.fp8_activations

    @property
    def head_format(self) -> str:
        """Number format of a head that stays in ggml's blocks; empty for other heads."""
        return self.quantization.head if self.quantization is not None else ""

    @property
    def qkv_columns(self) -> int:
        """Largest number of output columns of the merged gemm before attention, over all layers."""
        if self.latent is not None:
            queries = self.latent.query_rank or self.latent.queries(self.heads)
            return queries + self.latent.row
        return max(sum(self.qkv_heads(n)) * self.head_dim_of(n) for n in range(self.layers))


def runtime_config(config: ModelConfig, *, gpu: bool) -> tuple[ModelConfig, list[str]]:
    """Choose a floating type to compute in. `gpu` False: for the references on a CPU.

    Returns also sentences on differences from the checkpoint."""
    notes = []
    if gpu and config.dtype == "float32":
        notes.append("The weights are stored in fp32 and loaded as bf16.")
        config = replace(config, dtype="bfloat16")
    if config.family.post_normed and config.dtype == "float16":
        notes.append(
            "Numbers in this model exceed the range of fp16, in which it is stored. It runs in bf16."
        )
        config = replace(config, dtype="bfloat16")
    mx = config.quantization is not None and config.quantization.method == "mxfp8"
    if mx and config.dtype == "float16":
        notes.append("Scales of MXFP8 may exceed the range of fp16. The model runs in bf16.")
        config = replace(config, dtype="bfloat16")
    return config, notes


def rounded_config(config: ModelConfig, to: RoundedType | None, name: str) -> ModelConfig:
    """Return the config with layers rounded at the load, as --quantize requests.

    Raises UsageError for a quantized checkpoint and for layers that cannot be rounded to this type."""
    if to is None:
        return config
    if config.quantization is not None and not config.quantization.on_load:
        raise UsageError(
            f"{name} is already quantized ({config.quantization.label}) and cannot be rounded to {to}.",
            hint="Leave out --quantize, or use the bf16 version of the model.",
        )
    possible = rounded_types(config)
    if to not in possible:
        advice = "Leave out --quantize"
        if possible:
            advice = "Use --quantize " + " or ".join(possible)
        raise UsageError(
            f"{name} cannot be rounded to {to}: {_rounding_limit(config)}.",
            hint=f"{advice}, or use a GGUF file, which llama.cpp runs on this GPU too.",
        )
    return replace(config, quantization=rounding(to))


def rounded_types(config: ModelConfig) -> tuple[RoundedType, ...]:
    """Return the types that the load can round a floating checkpoint to."""
    if config.mixture is not None and config.family.experts.fixed_formats:
        return ()
    if config.mixture is not None or config.family.has_delta_nets:
        return ("int4",)
    if config.family.names.orders:
        return ("fp8", "int4")
    return get_args(RoundedType)


def _rounding_limit(config: ModelConfig) -> str:
    """Return why layers cannot be rounded to every type."""
    if config.family.has_delta_nets:
        return f"it is a hybrid, and {HYBRID_FORMS}"
    if config.mixture is not None:
        return (
            f"it is a mixture of experts, and {config.family.experts.fixed_formats or EXPERT_FORMS}"
        )
    return "rows of its queries and keys are sorted at the load, which 8-bit blocks do not allow"
