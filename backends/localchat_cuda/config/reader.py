"""Reads and checks config.json of a Hugging Face checkpoint. Imports no torch.

The error for an unsupported model lists the supported ones, and suggests llama.cpp.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, get_args

from localchat.errors import ModelInvalid
from localchat.model_files.checkpoint import read_object, weight_paths, whole_config
from localchat.model_files.safetensors import SafetensorsHeader, read_safetensors
from localchat_cuda.architectures import ARCHITECTURES, families, labels
from localchat_cuda.architectures.family import Family
from localchat_cuda.config.fields import ConfigFields
from localchat_cuda.config.gemma import read_gemma
from localchat_cuda.config.latent import read_latent
from localchat_cuda.config.mixture import Mixture, read_mixture
from localchat_cuda.config.model import HYBRID_FORMS, Activation, FloatType, ModelConfig
from localchat_cuda.config.quantization import STORED, Quantization, parse_quantization
from localchat_cuda.config.recurrent import Recurrent, read_kinds, read_recurrent
from localchat_cuda.config.rope import read_rotations
from localchat_cuda.config.tensor_names import is_text

HEAD_DIMENSIONS = (64, 96, 128, 256)
_MAX_LAYERS = 10_000
_UNSUPPORTED_HINT = (
    f"The CUDA backend loads {labels()} in {STORED}. For other models use a GGUF file, which "
    "llama.cpp runs on this GPU too."
)
_FLOAT_TYPES: dict[str, FloatType] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_GATE_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ACTIVATIONS: dict[str, Activation] = {"relu2": "relu2"}
"""Activations of feed-forward layers with and without a gate."""


class Multipliers(NamedTuple):
    """Factors of a Granite. The logits are divided by theirs."""

    embedding: float = 1.0
    attention: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


def read_config(folder: Path) -> ModelConfig:
    """Read the config of a checkpoint folder. Raises ModelMissing, ModelInvalid."""
    raw = read_raw(folder)
    headers: Iterable[SafetensorsHeader] = ()
    if not _has_dtype(raw):
        headers = map(read_safetensors, weight_paths(folder))
    return parse_config(raw, str(folder / "config.json"), headers)


def read_raw(folder: Path) -> Mapping[str, Any]:
    """Return the config.json of a checkpoint folder. Raises ModelMissing, ModelInvalid."""
    return whole_config(folder, read_object(folder / "config.json"))


def parse_config(
    raw: Mapping[str, Any], name: str, headers: Iterable[SafetensorsHeader] = ()
) -> ModelConfig:
    """Parse a config. `name`: of the file, for messages. Raises ModelInvalid.

    `headers`: of the weights, which decide the dtype if the config does not state it."""
    family = _Reader(raw, name).family()
    text = raw.get("text_config")
    vision = isinstance(text, dict) or "vision_config" in raw
    fields = {**family.defaults, **raw}
    if vision:
        # Models that read images have a section for their text part.
        fields |= text or {}
    if family.canonical is not None:
        fields = family.canonical(fields)
    reader = _Reader(fields, name)
    reader.check(family)
    heads, key_heads = reader.heads()
    hidden = reader.integer("hidden_size")
    latent = None
    if family.latent:
        latent = read_latent(reader)
        head_dim = latent.row
        rotary_dim = latent.rope
    else:
        head_dim = reader.integer("head_dim", hidden // heads)
        reader.check_columns(head_dim, "heads", HEAD_DIMENSIONS)
        rotary_dim = head_dim
    layers = reader.integer("num_hidden_layers", limit=_MAX_LAYERS)
    context = reader.integer("max_position_embeddings")
    gemma = read_gemma(reader, family, layers)
    rotations = read_rotations(reader, rotary_dim, context)
    if latent is not None and rotations.all.columns:
        raise reader.unsupported(f"rotations of {rotations.all.columns} of {rotary_dim} columns")
    context = max(context, rotations.context)
    context_capped = 0 < rotations.bound < context
    multipliers = reader.multipliers(family)
    quantization = parse_quantization(
        reader.raw.get("quantization_config"), name, reader.unsupported
    )
    mixture = reader.mixture(family, quantization)
    if gemma is not None and mixture is None:
        intermediate = gemma.intermediates[0]
    else:
        intermediate = reader.integer(family.intermediate_field)
    if family.multipliers:
        attention_scale = multipliers.attention
    elif latent is not None:
        attention_scale = latent.scale
    else:
        attention_scale = reader.attention_scale(family)
    # Layers here do not multiply their outputs by Granite's residual multiplier. Instead, the residual is
    # divided by it, which changes the scale of the embedding and the eps of the norms.
    embedding_scale = multipliers.embedding / multipliers.residual
    if family.scaled_embedding:
        embedding_scale = hidden**0.5
    return ModelConfig(
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        key_heads=1 if latent else key_heads,
        head_dim=head_dim,
        vocabulary=reader.integer("vocab_size"),
        context_train=rotations.bound if context_capped else context,
        context_capped=context_capped,
        eps=reader.number("rms_norm_eps", 1e-6) / multipliers.residual**2,
        rotation=rotations.all,
        windowed_rotation=rotations.windowed,
        tied=bool(reader.raw.get("tie_word_embeddings", False)),
        qkv_bias=reader.qkv_bias(family),
        quantization=quantization,
        dtype=reader.dtype(stored_type(headers)),
        windows=read_windows(
            reader, family, layers, context, own_rotation=rotations.windowed is not None
        ),
        attention_scale=attention_scale,
        attention_cap=reader.cap(family.attention_cap_field),
        head_cap=reader.cap(family.head_cap_field),
        activation=reader.activation(family),
        embedding_scale=embedding_scale,
        vision=vision,
        mixture=mixture,
        unrotated=reader.unrotated(family, layers),
        logits_divisor=multipliers.logits,
        recurrent=reader.recurrent(family, layers, quantization),
        feeds=reader.feeds(family, layers),
        gemma=gemma,
        latent=latent,
    )


def stored_type(headers: Iterable[SafetensorsHeader]) -> FloatType:
    """Return the type of most numbers in the floating tensors; fp16 without floating tensors."""
    counts: Counter[FloatType] = Counter()
    for header in headers:
        for tensor in header.tensors:
            if tensor.dtype in _FLOAT_TYPES and is_text(tensor.name):
                counts[_FLOAT_TYPES[tensor.dtype]] += tensor.size_bytes // int(tensor.dtype[-2:])
    return max(counts, key=lambda kind: counts[kind], default="float16")


def _has_dtype(raw: Mapping[str, Any]) -> bool:
    sections = [raw]
    if isinstance(raw.get("text_config"), dict):
        sections.append(raw["text_config"])
    return any(section.get("dtype") or section.get("torch_dtype") for section in sections)


def read_windows(
    fields: ConfigFields,
    family: Family,
    layers: int,
    context: int,
    *,
    own_rotation: bool = False,
) -> tuple[int, ...]:
    """Return the keys that a query sees in each layer; 0: all. Raises ModelInvalid.

    `own_rotation`: layers with a window have a rotation of their own."""
    raw = fields.raw
    switched_off = family.window_switch and not raw.get("use_sliding_window")
    if family.windows == "never" or switched_off or raw.get("sliding_window") is None:
        return (0,) * layers
    window = fields.integer("sliding_window")
    kinds = fields.kinds_of_layers("layer_types", layers, ("full_attention", "sliding_attention"))
    if kinds is not None:
        windowed = [kind == "sliding_attention" for kind in kinds]
    elif family.windows == "late":
        first = raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ModelInvalid(
                f"{fields.name}: max_window_layers is {first!r}, not a usable number."
            )
        windowed = [layer >= first for layer in range(layers)]
    elif family.windows == "pattern":
        pattern = fields.integer("sliding_window_pattern")
        windowed = [(layer + 1) % pattern != 0 for layer in range(layers)]
    else:
        windowed = [True] * layers
    # A window as wide as the context hides no key, but it may select the rotation of its layer.
    if window >= context and not own_rotation:
        window = 0
    return tuple(window * is_windowed for is_windowed in windowed)


class _Reader(ConfigFields):
    """Read the fields that only this module needs."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        super().__init__(raw, name, _UNSUPPORTED_HINT)

    def family(self) -> Family:
        """Return the family of the first supported class. Raises ModelInvalid without one."""
        listed = self.raw.get("architectures")
        classes = [str(name) for name in listed] if isinstance(listed, list) else []
        by_class = {name: family for family in families() for name in family.classes}
        family = next((by_class[name] for name in classes if name in by_class), None)
        if family is None:
            raise self.unsupported(f"the architecture {', '.join(classes) or 'of no name'}")
        # Models with and without experts may have the same class.
        if family.with_experts and self.raw.get("num_local_experts") != 0:
            relative: Family = ARCHITECTURES[family.with_experts].FAMILY
            return relative
        section = self.raw.get("quantization_config")
        is_gguf = isinstance(section, dict) and section.get("quant_method") == "gguf"
        if is_gguf and family.gguf is not None:
            merged = {**family.names.merged, **family.gguf.merged}
            return replace(family, names=replace(family.names, merged=merged))
        return family

    def check(self, family: Family) -> None:
        """Raise ModelInvalid for features that no family here supports."""
        if self.raw.get("mlp_bias"):
            raise self.unsupported("biases in the feed-forward layers")
        stated = self.raw.get("attention_bias")
        on_output = self.raw.get("attention_out_bias") and "o" not in family.names.biased
        if (family.qkv_bias == "never" and stated) or on_output:
            raise self.unsupported("biases in the attention layers of this architecture")
        if family.qkv_bias == "required" and not stated:
            raise self.unsupported("attention layers without the biases of this architecture")
        if self.raw.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise self.unsupported("attention to later tokens")

    def qkv_bias(self, family: Family) -> bool:
        """Return True if queries, keys and values have biases."""
        if family.qkv_bias == "optional":
            return bool(self.raw.get("attention_bias", True))
        return family.qkv_bias != "never"

    def heads(self) -> tuple[int, int]:
        """Return the number of query heads and of key heads. Raises ModelInvalid."""
        heads = self.integer("num_attention_heads")
        key_heads = self.integer("num_key_value_heads", heads)
        if heads % key_heads:
            raise self.unsupported(
                f"{heads} query heads, which are not a multiple of {key_heads} key heads"
            )
        return heads, key_heads

    def attention_scale(self, family: Family) -> float:
        """Return the scale of the attention's logits; 0.0: 1/sqrt(head_dim). Raises ModelInvalid."""
        if family.scale_field:
            return float(self.number(family.scale_field, 256.0) ** -0.5)
        return family.attention_scale

    def mixture(self, family: Family, quantization: Quantization | None) -> Mixture | None:
        """Read the experts of a layer. Raises ModelInvalid for forms without a kernel."""
        switch = family.experts.switch
        if family.names.experts is None or (switch and not self.raw.get(switch)):
            return None
        return read_mixture(self, family, quantization, gelu=self.activation(family) == "gelu_tanh")

    def multipliers(self, family: Family) -> Multipliers:
        """Read the factors of a Granite; 1.0 for other families. Raises ModelInvalid."""
        if not family.multipliers:
            return Multipliers()
        names = "embedding_multiplier", "attention_multiplier", "residual_multiplier"
        return Multipliers(*(self.number(name, 1.0) for name in (*names, "logits_scaling")))

    def unrotated(self, family: Family, layers: int) -> tuple[bool, ...]:
        """Return the layers without rotations; empty: all rotate. Raises ModelInvalid."""
        if not family.unrotated_by:
            return ()
        if family.unrotated_by != "no_rope_layers":
            rotates = self.raw.get(family.unrotated_by) == "rope"
            return () if rotates else (True,) * layers
        listed = self.raw.get("no_rope_layers")
        if listed is None:
            interval = self.integer("no_rope_layer_interval", 4)
            return tuple((layer + 1) % interval == 0 for layer in range(layers))
        if not isinstance(listed, list) or len(listed) < layers:
            raise ModelInvalid(f"{self.name}: no_rope_layers is not a list of {layers} numbers.")
        return tuple(not is_rotated for is_rotated in listed[:layers])

    def recurrent(
        self, family: Family, layers: int, quantization: Quantization | None
    ) -> Recurrent | None:
        """Read the running states of a hybrid. Raises ModelInvalid for forms without a kernel."""
        names = family.names.recurrent
        if names is None:
            return None
        if family.has_delta_nets:
            if quantization is not None and not quantization.packed:
                raise self.unsupported(
                    f"delta nets quantized as {quantization.label} ({HYBRID_FORMS})"
                )
            if self.activation(family) != "silu":
                raise self.unsupported("delta nets with another activation than SiLU")
        return read_recurrent(self, names.kind, layers)

    def feeds(self, family: Family, layers: int) -> tuple[bool, ...]:
        """Return the layers that are only a feed-forward layer; empty: every layer has one."""
        names = family.names.recurrent
        kinds = (names and read_kinds(self, names.kind, layers)) or ()
        feeds = tuple(kind in ("mlp", "moe") for kind in kinds)
        if not family.single_parts and any(feeds):
            raise self.unsupported("layers of a feed-forward part alone")
        return feeds if family.single_parts else ()

    def activation(self, family: Family) -> Activation:
        name = self.raw.get("hidden_activation") or self.raw.get("hidden_act") or "silu"
        activations = _GATE_ACTIVATIONS if family.gated_feed else _ACTIVATIONS
        if not isinstance(name, str) or name not in activations:
            raise self.unsupported(f"the activation {name}")
        return activations[name]

    def cap(self, field: str) -> float:
        """Return the soft cap of logits that a field states; 0.0: no cap."""
        if field and self.raw.get(field) is not None:
            return self.number(field, 0.0)
        return 0.0

    def dtype(self, stored: FloatType) -> FloatType:
        dtype = self.raw.get("dtype") or self.raw.get("torch_dtype") or stored
        if not _is_float_type(dtype):
            raise self.unsupported(f"weights in {dtype}")
        return dtype


def _is_float_type(name: object) -> TypeGuard[FloatType]:
    return name in get_args(FloatType)
