"""Shape of a model as the engine runs it. Imports no torch."""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from localchat.errors import UsageError
from localchat.fit.load_options import RoundedType
from localchat_cuda.config.delta_net import DeltaNet
from localchat_cuda.config.gemma import GemmaLayers
from localchat_cuda.config.latent import LatentAttention
from localchat_cuda.config.mixture import BESIDE_DENSE_FORMS, EXPERT_FORMS, Mixture
from localchat_cuda.config.quantization import Quantization, rounding
from localchat_cuda.config.rope import Rotation
from localchat_cuda.supported_architectures import GEMMAS, HYBRIDS, OLMOS, Architecture

Activation = Literal["silu", "gelu_tanh"]
FloatType = Literal["bfloat16", "float16", "float32"]

HYBRID_FORMS = "delta nets are possible in bf16, fp16 and 4 bits"
_NEVER_ROUNDED: dict[Architecture, str] = {
    "gpt_oss": "its experts are possible in bf16 and MXFP4",
    "gemma4": BESIDE_DENSE_FORMS,
}
"""Mixtures whose experts are not rounded at the load, and what they are possible in."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder of the Llama family."""

    architecture: Architecture
    layers: int
    hidden: int
    """Columns of the residual."""
    intermediate: int
    """Columns inside the MLP, or one expert."""
    heads: int
    """Of queries."""
    key_heads: int
    """Of keys and values."""
    head_dim: int
    vocabulary: int
    """Rows of the embedding."""
    context_train: int
    eps: float
    rotation: Rotation
    windowed_rotation: Rotation | None
    """Of the layers with a window, if it differs."""
    tied: bool
    """The head is the embedding."""
    qkv_bias: bool
    quantization: Quantization | None
    """Of the layers; None: they are floating."""
    dtype: FloatType
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a generation, as far as config.json states them."""
    windows: tuple[int, ...] = ()
    """By layer, the keys that a query sees; 0: all."""
    attention_scale: float = 0.0
    """Of the attention's logits; 0.0: 1/sqrt(head_dim)."""
    attention_cap: float = 0.0
    """The attention's logits become cap * tanh(logit / cap); 0.0: no cap."""
    head_cap: float = 0.0
    """The same for the head's logits."""
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    """Factor of the rows of the embedding."""
    vision: bool = False
    """The checkpoint sees images, too; that part is not loaded."""
    context_capped: bool = False
    """Beyond `context_train`, attention would need a scale by position, which no kernel here has."""
    mixture: Mixture | None = None
    """Of the feed-forward layers; None: they are dense."""
    unrotated: tuple[bool, ...] = ()
    """By layer, whether queries and keys are not rotated; empty: all are."""
    logits_divisor: float = 1.0
    """Of the head's logits."""
    delta_net: DeltaNet | None = None
    """Of a hybrid, whose attention has an output gate; None: all layers have attention."""
    latent: LatentAttention | None = None
    """Of multi-head latent attention, whose keys are one head of latents; None: it is the usual one."""
    gemma: GemmaLayers | None = None
    """Of a Gemma 3n or 4, whose layers differ; some of these numbers are then of its layers with a window."""

    def window(self, layer: int) -> int:
        """Keys that a query of a layer sees; 0: all."""
        return self.windows[layer] if self.windows else 0

    def has_delta_net(self, layer: int) -> bool:
        """True if a layer has a delta net in place of attention."""
        return self.delta_net is not None and self.delta_net.layers[layer]

    def head_dim_of(self, layer: int) -> int:
        """Columns of a head in a layer."""
        own = self.gemma
        if own is not None and own.full[layer]:
            return own.head_dim
        return self.head_dim

    def value_dim_of(self, layer: int) -> int:
        """Columns of a head of values in the cache of a layer."""
        if self.latent is None:
            return self.head_dim_of(layer)
        return self.latent.kv_rank

    def table_dim_of(self, layer: int) -> int:
        """Columns of a head that a layer's table of rotations has."""
        if self.latent is None:
            return self.head_dim_of(layer)
        return self.latent.rope

    def has_experts(self, layer: int) -> bool:
        """True if experts are the feed-forward layer, or a part of it."""
        mixture = self.mixture
        return mixture is not None and not (mixture.dense and mixture.dense[layer])

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return sum(map(self.has_experts, range(self.layers)))

    def key_heads_of(self, layer: int) -> int:
        """Heads of keys and values that a layer reads."""
        own = self.gemma
        if own is not None and own.full[layer]:
            return own.key_heads
        return self.key_heads

    def intermediate_of(self, layer: int) -> int:
        """Columns inside the MLP of a layer."""
        if self.gemma is not None:
            return self.gemma.intermediates[layer]
        if self.mixture is not None and not self.has_experts(layer):
            return self.mixture.dense_columns
        return self.intermediate

    def qkv_heads(self, layer: int) -> tuple[int, ...]:
        """Heads of each projection that a layer merges into one gemm: queries, of a hybrid with their gates,
        and keys and values as far as it has them."""
        keys = 2 if self.gemma is None else self.gemma.projections(layer)
        queries = self.heads if self.delta_net is None else 2 * self.heads
        return queries, *(self.key_heads_of(layer),) * keys

    def kv_source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself but for some of a Gemma 3n or 4."""
        return layer if self.gemma is None else self.gemma.source(layer)

    def rotation_of(self, layer: int) -> Rotation | None:
        """Rotation of a layer; None: its queries and keys are not rotated."""
        if self.unrotated and self.unrotated[layer]:
            return None
        windowed = self.windowed_rotation if self.window(layer) else None
        return windowed or self.rotation

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers with keys and values of their own."""
        return tuple(
            n for n in range(self.layers) if not self.has_delta_net(n) and self.kv_source(n) == n
        )

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.layers - (0 if self.delta_net is None else self.delta_net.count)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state in all delta nets."""
        numbers = 4 if self.dtype == "float32" else 2
        if self.delta_net is None:
            return 0
        return self.delta_net.state_bytes(numbers)

    @property
    def fp8_activations(self) -> bool:
        """True if gemms of many rows may round their activations to 8 bits."""
        return self.quantization is not None and self.quantization.fp8_activations

    @property
    def packed(self) -> bool:
        """True if layers become 4-bit codes in the order of the int4 gemms."""
        return self.quantization is not None and self.quantization.packed

    @property
    def head_format(self) -> str:
        """Number format of a head that stays in ggml's blocks; empty for others."""
        if self.quantization is not None:
            return self.quantization.head
        return ""

    @property
    def qkv_columns(self) -> int:
        """Most output columns of a merged gemm of queries, keys, values and a hybrid's output gate."""
        if self.latent is not None:
            return (self.latent.query_rank or self.latent.queries(self.heads)) + self.latent.row
        return max(sum(self.qkv_heads(n)) * self.head_dim_of(n) for n in range(self.layers))

    @property
    def normed_heads(self) -> bool:
        """True if queries and keys are normalized per head."""
        return self.architecture in ("qwen3", "qwen3_moe", "gemma3", "gemma3n", "gemma4", *HYBRIDS)

    @property
    def rounds_embedding_scale(self) -> bool:
        """True if the reference rounds the factor of embeddings to the model's dtype."""
        return self.post_normed

    @property
    def output_bias(self) -> bool:
        """True if attention's output layer has a bias."""
        return self.architecture == "gpt_oss"

    @property
    def sinks(self) -> bool:
        """True if each query head has a logit for a key without a value."""
        return self.architecture == "gpt_oss"

    @property
    def post_normed(self) -> bool:
        """True if outputs of attention and MLP are normalized before they join the residual."""
        return self.architecture in (*GEMMAS, "glm4", *OLMOS)

    @property
    def normed_projections(self) -> bool:
        """True if queries are normalized over all heads, as keys are; then inputs of layers have no norms."""
        return self.architecture in OLMOS


class RuntimeConfig(NamedTuple):
    """The config as the engine runs it. `notes`: sentences on how it differs from the checkpoint."""

    config: ModelConfig
    notes: tuple[str, ...]


def runtime_config(config: ModelConfig, *, gpu: bool) -> RuntimeConfig:
    """Choose a floating type that the engine computes in. `gpu` False: for the references on a CPU."""
    notes = []
    if gpu and config.dtype == "float32":
        notes.append("The weights are stored in fp32; they are loaded as bf16.")
        config = replace(config, dtype="bfloat16")
    if config.post_normed and config.dtype == "float16":
        notes.append(
            "Numbers in this model leave the range of fp16, in which it is stored: it runs in bf16."
        )
        config = replace(config, dtype="bfloat16")
    return RuntimeConfig(config, tuple(notes))


def rounded_config(config: ModelConfig, to: RoundedType | None, name: str) -> ModelConfig:
    """The config whose layers are rounded at the load, as --quantize asks (None: as they are).

    Raises UsageError for a checkpoint that is quantized."""
    if to is None:
        return config
    if config.quantization is not None and not config.quantization.on_load:
        raise UsageError(
            f"{name} is quantized already ({config.quantization.label}), and cannot be rounded to {to}.",
            hint="Leave out --quantize, or name the model in bf16.",
        )
    never = _NEVER_ROUNDED.get(config.architecture) if config.mixture else None
    expected = config.mixture is not None or config.delta_net is not None
    if expected and (to != "int4" or never):
        kind = "a hybrid" if config.delta_net else "a mixture of experts"
        forms = never or (HYBRID_FORMS if config.delta_net else EXPERT_FORMS)
        other = "Leave out --quantize" if never else "Ask for --quantize int4"
        raise UsageError(
            f"{name} is {kind}, and cannot be rounded to {to}: {forms}.",
            hint=f"{other}, or take a GGUF file: llama.cpp runs it on this GPU too.",
        )
    return replace(config, quantization=rounding(to))
