"""Shape of a GGUF model: everything that determines its memory, per layer.

The rules follow llama.cpp (src/llama-hparams.cpp and src/models/): which layers have keys and values, which
see only a sliding window, and which have a recurrent state. An architecture that is not listed counts as
plain attention in every layer, which never underestimates.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final, Literal, NamedTuple

from localchat.model_files.ggml_types import NumberFormat
from localchat.model_files.gguf import Array, GgufTensor, Header, Value


class Window(NamedTuple):
    """Sliding windows of an architecture.

    The first or last of every `period` layers sees all tokens, and the others see `window` tokens.
    """

    window: int
    """Window in tokens. 0 if the header must state it."""
    period: int
    dense_first: bool = False


_WINDOWS: dict[str, Window] = {
    "afmoe": Window(0, 4),
    "cohere2": Window(0, 4),
    "cohere2moe": Window(0, 4, dense_first=True),
    "exaone-moe": Window(128, 4),
    "exaone4": Window(4096, 4),
    "gemma2": Window(4096, 2),
    "gemma3": Window(0, 6),
    "gemma3n": Window(0, 5),
    "gemma4": Window(0, 0),
    "gpt-oss": Window(0, 2),
    "granite_swa": Window(0, 0),
    "laguna": Window(0, 4, dense_first=True),
    "llama4": Window(8192, 4),
    "maple": Window(0, 0),
    "mellum": Window(0, 4),
    "mimo2": Window(0, 0),
    "muse-glimmer": Window(0, 4),
    "olmo2": Window(0, 4),
    "plamo3": Window(0, 8),
    "smallthinker": Window(4096, 4, dense_first=True),
    "spark2_5": Window(0, 0),
    "step35": Window(0, 0),
}
"""Architectures whose windows llama.cpp applies.

Others may name a window in the header (Mistral, Qwen2, Phi-3), but llama.cpp stores all tokens. Period 0:
only the header's pattern counts.
"""

_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_HYBRID_BY_HEADS = frozenset(
    {
        *("bailingmoe3", "glm5-next", "granitehybrid", "jamba", "kimi-k3", "kimi-linear"),
        *("lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "plamo2"),
    }
)
"""Architectures whose layers without key-value heads are recurrent."""
_HYBRID_BY_INTERVAL = frozenset({"minimax-01", "qwen35", "qwen35moe", "qwen3next", "qwen4exp"})
"""Architectures with attention in every fourth layer, or as the header states.

The layers between are recurrent.
"""


_IMAGE_TENSORS = ("v.", "mm.", "vision_tower.", "vision_model.", "model.vision")


class LayerShape(NamedTuple):
    """Memory of one layer."""

    keys: int
    """Numbers per token."""
    values: int
    """Numbers per token."""
    sliding: bool = False
    """Whether only a window of tokens is needed."""
    state: int = 0
    """Numbers per sequence, independent of its length."""


class Weight(NamedTuple):
    """A weight tensor, as far as memory and speed depend on it."""

    part: Literal["embedding", "output", "layer", "lookup", "other"]
    """Use of the tensor. `lookup` is a table in RAM beside the embedding, of which a token reads one row."""
    format: NumberFormat
    shape: tuple[int, ...]
    """Fastest dimension first, as in ggml."""
    size_bytes: int
    layer: int = -1
    """Layer number, for the part `layer`."""
    routed: bool = False
    """Whether it has a slice per expert. A token reads only the slices of its experts."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Data for planning the load of a GGUF model.

    It comes from a file or from a catalogue's table.

    Size: memory plans of all families need these dimensions.
    """

    name: str
    """Name for messages."""
    architecture: str
    layers: tuple[LayerShape, ...]
    """Layers without the prediction layers."""
    all_layers: int
    """Number of layers in the file, including the prediction layers."""
    embedding: int
    heads: int
    head_width: int
    feed_forward: int
    """Width of the widest feed-forward layer per token. Only the experts in use count."""
    vocab_size: int
    context_train: int
    weights: tuple[Weight, ...]
    quantization: str
    """Name of the mix, such as Q4_K_M."""
    file_bytes: int
    window: int = 0
    """Window of the sliding layers in tokens, 0 without any."""
    experts: int = 0
    experts_used: int = 0
    """Experts per token."""
    inner: int = 0
    """Inner width of recurrent layers."""
    positions: int = 0
    """Number of learned positions, which limits the context. 0 without any."""
    pooling: str = ""
    """Pooling (see pooling_of)."""
    vocabulary: bool = True
    """Whether the file has a vocabulary. Parts of models, such as adapters, have none."""
    images: bool = False
    """Whether the file contains an image encoder."""
    context_scaled: int = 0
    """Longest context with the rope scaling of the file, 0 without scaling."""
    long_rope: bool = False
    """Whether the size of the cache selects one of two sets of rope factors."""
    key_biases: bool = False
    """Whether keys have biases, and therefore outliers that four bits cannot store."""
    head: tuple[Weight, ...] = ()
    """Weights of the prediction layers. They are not part of `weights`."""
    header: Header | None = field(default=None, compare=False, repr=False)
    """Header of the file, None for a shape from a catalogue's table."""

    @property
    def recurrent(self) -> bool:
        """Whether some layer has a state that cannot be truncated."""
        return any(layer.state for layer in self.layers)

    @property
    def tied(self) -> bool:
        """Whether the input embedding is also the output matrix."""
        return not any(weight.part == "output" for weight in self.weights)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.size_bytes for weight in self.weights)

    def read_weights(self) -> Iterator[tuple[Weight, int]]:
        """Yield the matrices that a token reads, with the bytes that it reads.

        Only the experts in use count. An input embedding counts only if it is also the output.
        """
        tied = self.tied
        for weight in self.weights:
            looked_up = weight.part == "lookup" or (weight.part == "embedding" and not tied)
            if len(weight.shape) < 2 or looked_up:
                continue
            size = weight.size_bytes
            if weight.routed and self.experts:
                size = size * self.experts_used // self.experts
            yield weight, size

    @property
    def token_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        return sum(read for _, read in self.read_weights())

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        return sum(prod(weight.shape) for weight in self.weights)

    def scaled(self, quantization: str, share: float) -> "ModelShape":
        """Return the shape in another quantization, whose weights take this share of the bytes."""
        weights, head = (
            tuple(weight._replace(size_bytes=round(weight.size_bytes * share)) for weight in part)
            for part in (self.weights, self.head)
        )
        return replace(self, weights=weights, head=head, quantization=quantization)


def model_shape(header: Header) -> ModelShape:
    """Return the shape of a model with a checked header (open_gguf.check_model)."""
    all_layers = header.number("block_count")
    count = all_layers - header.number("nextn_predict_layers")
    # A file may consist of prediction layers only.
    if count <= 0:
        count = all_layers
    heads = header.numbers("attention.head_count", all_layers)
    sliding, window = _sliding(header, count)
    weights = [_weight(tensor) for tensor in header.tensors]
    return ModelShape(
        name=header.name,
        architecture=header.architecture,
        layers=_layers(header, count, heads, sliding),
        all_layers=all_layers,
        embedding=header.number("embedding_length"),
        heads=max(heads),
        head_width=_head_width(header, heads[0]),
        feed_forward=_feed_forward(header, all_layers),
        vocab_size=_vocab_size(header),
        context_train=header.number("context_length"),
        weights=tuple(weight for weight in weights if weight.layer < count),
        head=tuple(weight for weight in weights if weight.layer >= count),
        quantization=header.quantization,
        file_bytes=header.file_bytes,
        window=window if any(sliding) else 0,
        experts=header.number("expert_count"),
        experts_used=max(header.numbers("expert_used_count", all_layers)),
        inner=header.number("ssm.inner_size"),
        positions=_positions(header),
        pooling=pooling_of(header),
        vocabulary=header.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab"),
        images=any(tensor.name.startswith(_IMAGE_TENSORS) for tensor in header.tensors),
        context_scaled=_scaled_context(header),
        long_rope=any("rope_factors_long" in tensor.name for tensor in header.tensors),
        key_biases=any(tensor.name.endswith("attn_k.bias") for tensor in header.tensors),
        header=header,
    )


def _scaled_context(header: Header) -> int:
    """Return the context that the rope scaling reaches, 0 without scaling."""
    values = header.metadata
    factor = values.get(f"{header.architecture}.rope.scaling.factor")
    kind = values.get(f"{header.architecture}.rope.scaling.type")
    if kind in (None, "none") or not isinstance(factor, int | float) or not 1 < factor < 1e6:
        return 0
    trained = header.number("context_length")
    original = header.number("rope.scaling.original_context_length", trained)
    return int(original * factor)


def _weight(tensor: GgufTensor) -> Weight:
    layer = _layer_number(tensor.name)
    part: Literal["embedding", "output", "layer", "lookup", "other"] = "other"
    if layer >= 0:
        part = "layer"
    elif tensor.name == "per_layer_token_embd.weight":
        part = "lookup"
    elif tensor.name == "token_embd.weight":
        part = "embedding"
    elif tensor.name == "output.weight":
        part = "output"
    return Weight(
        part,
        tensor.format,
        tensor.shape,
        tensor.size_bytes,
        layer=layer,
        routed="_exps." in tensor.name,
    )


def _layer_number(name: str) -> int:
    """Return the layer number in a tensor name, -1 for other tensors."""
    number = name.removeprefix("blk.").partition(".")[0]
    if not name.startswith("blk.") or not number.isdigit():
        return -1
    return int(number)


def _positions(header: Header) -> int:
    for tensor in header.tensors:
        if tensor.name == "position_embd.weight" and len(tensor.shape) > 1:
            return tensor.shape[1]
    return 0


def _head_width(header: Header, heads: int) -> int:
    default = header.number("embedding_length") // heads if heads else 0
    return header.number("attention.key_length", default)


def _vocab_size(header: Header) -> int:
    for tensor in header.tensors:
        if tensor.name in ("token_embd.weight", "output.weight") and len(tensor.shape) > 1:
            return tensor.shape[1]
    return header.vocab_size


def _feed_forward(header: Header, layers: int) -> int:
    dense = max(header.numbers("feed_forward_length", layers))
    used = max(header.numbers("expert_used_count", layers))
    if not used:
        return dense
    expert = max(header.numbers("expert_feed_forward_length", layers)) or dense
    shared = max(header.numbers("expert_shared_feed_forward_length", layers))
    return max(used * expert, shared)


def _sliding(header: Header, count: int) -> tuple[tuple[bool, ...], int]:
    """Return whether each layer sees only a window, and the window in tokens."""
    pattern = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
    stated = header.number("attention.sliding_window", -1)
    return sliding_layers(header.architecture, count, None if stated < 0 else stated, pattern)


def sliding_layers(
    architecture: str, count: int, stated: int | None = None, pattern: Value | None = None
) -> tuple[tuple[bool, ...], int]:
    """Return whether each layer sees only a window, and the window in tokens.

    stated, pattern: window and pattern of the model, which override those of its architecture.
    """
    rule = _WINDOWS.get(architecture)
    if rule is None or (architecture == "exaone4" and count != 64):
        return (False,) * count, 0
    window = rule.window
    # llama.cpp ignores a window in the header of Llama 4 unless it is 0.
    if stated is not None and not (architecture == "llama4" and stated):
        window = stated
    if not window:
        return (False,) * count, 0
    if isinstance(pattern, Array):
        values = pattern.values or ()
        flags = [bool(value) for value in values[:count]]
        return tuple(flags + [False] * (count - len(flags))), window
    period = rule.period
    if isinstance(pattern, int) and pattern:
        period = pattern
    if period == 0:
        return (False,) * count, 0
    dense = 0 if rule.dense_first else period - 1
    return tuple(i % period != dense for i in range(count)), window


def _layers(
    header: Header, count: int, heads: tuple[int, ...], sliding: tuple[bool, ...]
) -> tuple[LayerShape, ...]:
    kv_key = f"{header.architecture}.attention.head_count_kv"
    kv_heads = heads
    if kv_key in header.metadata:
        kv_heads = header.numbers("attention.head_count_kv", count)
    keys = _head_width(header, heads[0])
    default = header.number("embedding_length") // heads[0] if heads[0] else 0
    values = header.number("attention.value_length", default)
    # Multi-head latent attention caches a compressed row per token, in the keys.
    latent = bool(
        header.number("attention.key_length_mla") and header.number("attention.value_length_mla")
    )
    attends, carries = _kinds(header, count, kv_heads)
    layers_with_kv = _layers_with_kv(header, count)
    state = _state_numbers(header, heads[0])
    layers = []
    for i in range(count):
        key_width = keys
        value_width = values
        if sliding[i]:
            key_width = header.number("attention.key_length_swa", keys)
            value_width = header.number("attention.value_length_swa", values)
        has_kv = attends[i] and i < layers_with_kv
        layers.append(
            LayerShape(
                keys=key_width * kv_heads[i] if has_kv else 0,
                values=value_width * kv_heads[i] if has_kv and not latent else 0,
                sliding=sliding[i],
                state=state if carries[i] else 0,
            )
        )
    return tuple(layers)


def _layers_with_kv(header: Header, count: int) -> int:
    """Return the number of leading layers with their own KV.

    Later layers of Gemma 3n and 4 reuse it.
    """
    if header.architecture == "gemma3n":
        return 20
    if header.architecture == "gemma4":
        return header.number("block_count") - header.number("attention.shared_kv_layers")
    return count


def _kinds(
    header: Header, count: int, kv_heads: tuple[int, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return whether each layer has keys and values, and whether it has a recurrent state."""
    name = header.architecture
    if name in _RECURRENT:
        return (False,) * count, (True,) * count
    if name == "falcon-h1":
        return (True,) * count, (True,) * count
    if name in _HYBRID_BY_HEADS:
        # Nemotron has separate layers for feed-forward and for attention or recurrence.
        mixes = (True,) * count
        if name.startswith("nemotron"):
            widths = header.numbers("feed_forward_length", count)
            mixes = tuple(width == 0 for width in widths)
        return (
            tuple(bool(kv_heads[i]) and mixes[i] for i in range(count)),
            tuple(not kv_heads[i] and mixes[i] for i in range(count)),
        )
    if name in _HYBRID_BY_INTERVAL:
        if f"{name}.attention.recurrent_layers" in header.metadata:
            carries = tuple(
                bool(flag) for flag in header.numbers("attention.recurrent_layers", count)
            )
        else:
            interval = max(header.number("full_attention_interval", 4), 1)
            carries = tuple((i + 1) % interval != 0 for i in range(count))
        return tuple(not flag for flag in carries), carries
    return (True,) * count, (False,) * count


def _state_numbers(header: Header, heads: int) -> int:
    """Return the f32 numbers of a recurrent layer's state, including the convolution tail."""
    embedding = header.number("embedding_length")
    if head := header.number("wkv.head_size"):
        return embedding * (header.number("token_shift_count", 2) + head)
    if cache := header.number("shortconv.l_cache"):
        return embedding * (cache - 1)
    kernel = header.number("ssm.conv_kernel")
    inner = header.number("ssm.inner_size")
    if head := header.number("kda.head_dim"):
        return 3 * max(kernel - 1, 0) * heads * head + head * head * heads
    if header.architecture == "minimax-01":
        return _head_width(header, heads) ** 2 * heads
    states = header.number("ssm.state_size")
    tail = max(kernel - 1, 0) * (inner + 2 * header.number("ssm.group_count") * states)
    return tail + states * inner


ENCODERS: Final = frozenset(
    {
        *("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2"),
        *("jina-bert-v3", "eurobert", "gemma-embedding"),
    }
)
"""Architectures without a KV cache, because every token sees the whole text."""
DIFFUSION: Final = frozenset({"dream", "llada", "llada-moe", "rnd1"})
"""Architectures that generate text in many passes. Their tokens see the whole text too."""
RANK: Final = "rank"
"""Pooling of a reranker, which no backend runs."""
POOLING_NUMBERS: Final = {"mean": 1, "cls": 2, "last": 3, RANK: 4}
"""llama.cpp's numbers. A file without a number is pooled by the mean."""
_NAMES: Final = {number: name for name, number in POOLING_NUMBERS.items()}


def pooling_of(header: Header) -> str:
    """Return `mean`, `cls` or `last` for embedding models, `rank` for rerankers, otherwise an empty string.

    The number 0 means no pooling. llama.cpp's tools write it into every model that they save, so it does not
    identify an embedding model.
    """
    name = header.architecture
    sees_all = header.metadata.get(f"{name}.attention.causal") is False and name not in DIFFUSION
    embeds = sees_all or name in ENCODERS or name == "llama-embed"
    stated = header.metadata.get(f"{name}.pooling_type")
    if not isinstance(stated, int) or isinstance(stated, bool) or stated == 0:
        return "mean" if embeds else ""
    return _NAMES.get(stated, "")
