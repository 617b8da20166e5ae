"""Shape of a GGUF model: everything that costs memory while it runs, layer by layer.

The rules follow llama.cpp (src/llama-hparams.cpp and src/models/): which layers keep keys and values, which
see a sliding window only, which carry a recurrent state. An architecture that is not listed counts as plain
attention in every layer, which is never too little.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Final, Literal, NamedTuple

from localchat.model_files.ggml_types import NumberFormat
from localchat.model_files.gguf import Array, GgufTensor, Header, Value


class Window(NamedTuple):
    """Sliding windows of an architecture.

    Every `period`-th layer sees everything (the first of them, or the last), the others `window` tokens.
    """

    window: int
    """0: the header must state it."""
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
"""Architectures whose windows llama.cpp honours. Others may name a window in the header (Mistral, Qwen2,
Phi-3): llama.cpp keeps everything there. Period 0: the header's pattern alone decides."""

_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_HYBRID_BY_HEADS = frozenset(
    {
        *("bailingmoe3", "glm5-next", "granitehybrid", "jamba", "kimi-k3", "kimi-linear"),
        *("lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "plamo2"),
    }
)
"""A layer without key-value heads is recurrent."""
_HYBRID_BY_INTERVAL = frozenset({"minimax-01", "qwen35", "qwen35moe", "qwen3next", "qwen4exp"})
"""Every fourth layer (or as the header states) attends, the others are recurrent."""


_IMAGE_TENSORS = ("v.", "mm.", "vision_tower.", "vision_model.", "model.vision")


class LayerShape(NamedTuple):
    """Memory of one layer."""

    keys: int
    """Numbers per token."""
    values: int
    """Numbers per token."""
    sliding: bool = False
    """Only a window of them is needed."""
    state: int = 0
    """Numbers per sequence, whatever its length."""


class Weight(NamedTuple):
    """One tensor of weights, as far as memory and speed depend on it."""

    part: Literal["embedding", "output", "layer", "lookup", "other"]
    """`lookup`: a table beside the embedding, in RAM, of which a token reads one row."""
    format: NumberFormat
    shape: tuple[int, ...]
    """Fastest dimension first, as ggml counts."""
    size_bytes: int
    layer: int = -1
    """Of the part `layer`: its number."""
    routed: bool = False
    """One slice an expert: a token reads those of the experts in use."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything that planning a load of a GGUF model needs. Of a file, or of a catalogue's table."""

    name: str
    """For messages."""
    architecture: str
    layers: tuple[LayerShape, ...]
    """The trunk."""
    all_layers: int
    """As the file counts, with the prediction layers after the trunk."""
    embedding: int
    heads: int
    head_width: int
    feed_forward: int
    """Of the widest layer, per token (experts in use counted)."""
    vocab_size: int
    context_train: int
    weights: tuple[Weight, ...]
    quantization: str
    """Name of the mix, such as Q4_K_M."""
    file_bytes: int
    window: int = 0
    """Tokens that sliding layers need; 0: there are none."""
    experts: int = 0
    experts_used: int = 0
    """Per token."""
    inner: int = 0
    """Width of a recurrent layer's inside."""
    positions: int = 0
    """Learned positions, which bound the context; 0: there are none."""
    pooling: str = ""
    """See pooling_of."""
    vocabulary: bool = True
    """False for a part of a model, such as an adapter."""
    images: bool = False
    """True if an image encoder is in the same file."""
    context_scaled: int = 0
    """Longest context of the rope scaling that the file declares; 0: it declares none."""
    long_rope: bool = False
    """The size of the cache selects one of two sets of rope factors."""
    key_biases: bool = False
    """Keys have biases, and with them outliers that four bits cannot store."""
    header: Header | None = field(default=None, compare=False, repr=False)
    """Of the file; None for a shape of a catalogue's table."""

    @property
    def recurrent(self) -> bool:
        """True if some layer carries a state that cannot be cut back."""
        return any(layer.state for layer in self.layers)

    @property
    def tied(self) -> bool:
        """True if the input embedding is the output matrix too."""
        return not any(weight.part == "output" for weight in self.weights)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.size_bytes for weight in self.weights)

    def read_weights(self) -> Iterator[tuple[Weight, int]]:
        """Matrices that one token reads, with the bytes that it reads of them.

        Of experts those in use, and of an input embedding nothing unless it is the output too."""
        tied = self.tied
        for weight in self.weights:
            looked_up = weight.part == "lookup" or (weight.part == "embedding" and not tied)
            if len(weight.shape) < 2 or looked_up:
                continue
            shared = not (weight.routed and self.experts)
            size = weight.size_bytes
            yield weight, size if shared else size * self.experts_used // self.experts

    @property
    def token_bytes(self) -> int:
        """Bytes of weights that one token reads."""
        return sum(read for _, read in self.read_weights())

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        return sum(prod(weight.shape) for weight in self.weights)


def model_shape(header: Header) -> ModelShape:
    """The shape of the model with this checked header (open_gguf.check_model)."""
    all_layers = header.number("block_count")
    count = all_layers - header.number("nextn_predict_layers")
    # A file of prediction layers alone keeps them all.
    count = count if count > 0 else all_layers
    heads = header.numbers("attention.head_count", all_layers)
    sliding, window = _sliding(header, count)
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
        weights=tuple(_weight(tensor) for tensor in header.tensors),
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
    """Context that the declared rope scaling reaches; 0 without one."""
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
    part: Literal["embedding", "output", "layer", "lookup", "other"] = (
        "other" if layer is None else "layer"
    )
    if tensor.name == "per_layer_token_embd.weight":
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
        layer=-1 if layer is None else layer,
        routed="_exps." in tensor.name,
    )


def _layer_number(name: str) -> int | None:
    """The layer that a tensor of this name belongs to; None: to no layer."""
    if not name.startswith("blk."):
        return None
    number = name[4:].partition(".")[0]
    return int(number) if number.isdigit() else None


def _positions(header: Header) -> int:
    found = (tensor for tensor in header.tensors if tensor.name == "position_embd.weight")
    return next((tensor.shape[1] for tensor in found if len(tensor.shape) > 1), 0)


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
    """Per layer, whether it sees a window only; and the window in tokens."""
    pattern = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
    stated = header.number("attention.sliding_window", -1)
    return sliding_layers(header.architecture, count, None if stated < 0 else stated, pattern)


def sliding_layers(
    architecture: str, count: int, stated: int | None = None, pattern: Value | None = None
) -> tuple[tuple[bool, ...], int]:
    """Per layer, whether it sees a window only; and the window in tokens.

    `stated`, `pattern`: window and pattern of the model itself, over those of its architecture.
    """
    rule = _WINDOWS.get(architecture)
    if rule is None or (architecture == "exaone4" and count != 64):
        return (False,) * count, 0
    window = rule.window if stated is None or (architecture == "llama4" and stated) else stated
    if not window:
        return (False,) * count, 0
    if isinstance(pattern, Array):
        values = pattern.values or ()
        return tuple(bool(values[i]) if i < len(values) else False for i in range(count)), window
    period = pattern if isinstance(pattern, int) and pattern else rule.period
    if period == 0:
        return (False,) * count, 0
    dense = 0 if rule.dense_first else period - 1
    return tuple(i % period != dense for i in range(count)), window


def _layers(
    header: Header, count: int, heads: tuple[int, ...], sliding: tuple[bool, ...]
) -> tuple[LayerShape, ...]:
    kv_key = f"{header.architecture}.attention.head_count_kv"
    kv_heads = (
        header.numbers("attention.head_count_kv", count) if kv_key in header.metadata else heads
    )
    keys = _head_width(header, heads[0])
    default = header.number("embedding_length") // heads[0] if heads[0] else 0
    values = header.number("attention.value_length", default)
    # Multi-head latent attention caches one compressed row per token, in the keys.
    latent = bool(
        header.number("attention.key_length_mla") and header.number("attention.value_length_mla")
    )
    attends, carries = _kinds(header, count, kv_heads)
    kept = _layers_with_kv(header, count)
    state = _state_numbers(header, heads[0])
    found = []
    for i in range(count):
        width_keys = header.number("attention.key_length_swa", keys) if sliding[i] else keys
        width_values = header.number("attention.value_length_swa", values) if sliding[i] else values
        has_kv = attends[i] and i < kept
        found.append(
            LayerShape(
                keys=width_keys * kv_heads[i] if has_kv else 0,
                values=width_values * kv_heads[i] if has_kv and not latent else 0,
                sliding=sliding[i],
                state=state if carries[i] else 0,
            )
        )
    return tuple(found)


def _layers_with_kv(header: Header, count: int) -> int:
    """Leading layers with keys and values of their own; later ones reuse them (Gemma 3n, 4)."""
    if header.architecture == "gemma3n":
        return 20
    if header.architecture == "gemma4":
        return header.number("block_count") - header.number("attention.shared_kv_layers")
    return count


def _kinds(
    header: Header, count: int, kv_heads: tuple[int, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Per layer: does it keep keys and values, does it carry a state."""
    name = header.architecture
    if name in _RECURRENT:
        return (False,) * count, (True,) * count
    if name == "falcon-h1":
        return (True,) * count, (True,) * count
    if name in _HYBRID_BY_HEADS:
        feed_forward = (
            header.numbers("feed_forward_length", count)
            if name.startswith("nemotron")
            else (0,) * count
        )
        mixes = tuple(width == 0 for width in feed_forward)
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
    """Numbers (f32) of one recurrent layer's state: convolution tail and state proper."""
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


# ---------------------------------------------------------------------------- embedding models

ENCODERS: Final = frozenset(
    {
        *("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2"),
        *("jina-bert-v3", "eurobert", "gemma-embedding"),
    }
)
"""Architectures without a KV cache: every token sees the whole text."""
DIFFUSION: Final = frozenset({"dream", "llada", "llada-moe", "rnd1"})
"""Architectures whose tokens see the whole text too, and that write it in many passes."""
POOLING_NUMBERS: Final = {"mean": 1, "cls": 2, "last": 3, "rank": 4}
"""llama.cpp's numbers. A file that names none is pooled by the mean, as its users do."""
_NAMES: Final = {number: name for name, number in POOLING_NUMBERS.items()}


def pooling_of(header: Header) -> str:
    """Pooling of an embedding model: `mean`, `cls` or `last`; `rank` for a reranker; empty for a model that
    writes text.

    0 stands for no pooling: llama.cpp's own tools write it into every model that they save, so it does not
    turn a model that writes into an embedding model.
    """
    name = header.architecture
    sees_all = header.metadata.get(f"{name}.attention.causal") is False and name not in DIFFUSION
    embeds = sees_all or name in ENCODERS or name == "llama-embed"
    stated = header.metadata.get(f"{name}.pooling_type")
    if not isinstance(stated, int) or isinstance(stated, bool) or stated == 0:
        return "mean" if embeds else ""
    return _NAMES.get(stated, "")
