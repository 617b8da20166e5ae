"""Reads how the layers of a Gemma 3n or 4 differ from each other. Imports no torch.

In small models the last layers read the keys and values of the last earlier layer of their kind, and all layers
read a second embedding of each token. In Gemma 4, layers without a window have fewer and wider key heads, whose
values may be the keys before their norm. Gemma 3n has several streams of the residual.
"""

from dataclasses import dataclass, replace
from statistics import NormalDist

from localchat.errors import ModelInvalid
from localchat_cuda.architectures.family import Family
from localchat_cuda.config.fields import ConfigFields

HEAD_DIMENSIONS = (64, 96, 128, 256, 512)
"""Supported head dimensions of layers without a window."""
_KINDS = ("sliding_attention", "full_attention")
_MAX_STREAMS = 8
_SPARSE_LAYERS = 10
_SPARSITY = 0.95
"""Share of zero gates in a Gemma 3n's first layers, by default."""


@dataclass(frozen=True, slots=True)
class AltUp:
    """Streams of the residual. Layers compute with the first one and correct the others."""

    streams: int
    laurel_rank: int
    """Columns inside the low-rank product beside attention."""
    scaled: bool
    """The gate of the second embedding reads the first stream times a scale by column."""
    sparsities: tuple[float, ...]
    """Share of each layer's MLP gates that become 0, as if gates were normally distributed."""

    def cutoff(self, layer: int) -> float | None:
        """Return the threshold of a layer's gates in standard deviations above the mean. None: no threshold."""
        share = self.sparsities[layer]
        if not share:
            return None
        return NormalDist().inv_cdf(share)


@dataclass(frozen=True, slots=True)
class GemmaLayers:
    """Differences between the layers of a Gemma 3n or 4."""

    full: tuple[bool, ...]
    """Whether each layer sees the full context, without a window."""
    key_heads: int
    """Key heads of layers without a window."""
    head_dim: int
    """Columns of a head in layers without a window."""
    values_are_keys: bool
    """Layers without a window use the keys before their norm as values."""
    shared: int
    """Number of last layers that read the keys and values of earlier layers."""
    intermediates: tuple[int, ...]
    """Columns inside each layer's MLP."""
    input_columns: int
    """Columns of the second embedding that each layer reads; 0: the model has only one embedding."""
    input_vocabulary: int
    """Rows of the second embedding."""
    altup: AltUp | None = None

    def reads_earlier(self, layer: int) -> bool:
        """Return True if a layer reads the keys and values of an earlier layer."""
        return layer >= len(self.full) - self.shared

    def source(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads."""
        if not self.reads_earlier(layer):
            return layer
        own = range(len(self.full) - self.shared)
        return next(source for source in reversed(own) if self.full[source] == self.full[layer])

    def projections(self, layer: int) -> int:
        """Return how many projections of keys and values a layer has: 0 to 2."""
        if self.reads_earlier(layer):
            return 0
        if self.values_are_keys and self.full[layer]:
            return 1
        return 2

    def keep(self, layers: tuple[int, ...]) -> "GemmaLayers":
        """Return the data of some layers. Each kind of layer that others read must be among them."""
        altup = self.altup
        if altup is not None:
            altup = replace(altup, sparsities=tuple(altup.sparsities[n] for n in layers))
        return replace(
            self,
            full=tuple(self.full[n] for n in layers),
            shared=sum(map(self.reads_earlier, layers)),
            intermediates=tuple(self.intermediates[n] for n in layers),
            altup=altup,
        )


def read_gemma(fields: ConfigFields, family: Family, layers: int) -> GemmaLayers | None:
    """Read the differences between a model's layers; None for other families. Raises ModelInvalid."""
    if family.names.inputs is None:
        return None
    if family.names.altup is not None:
        return _read_gemma3n(fields, layers)
    return _read_gemma4(fields, layers)


def _read_gemma4(fields: ConfigFields, layers: int) -> GemmaLayers:
    raw = fields.raw
    full = _full_layers(fields, layers)
    key_heads, head_dim = _full_shape(fields, full)
    if head_dim not in HEAD_DIMENSIONS:
        supported = ", ".join(map(str, HEAD_DIMENSIONS))
        raise fields.unsupported(f"heads of {head_dim} columns (supported: {supported})")
    heads = fields.integer("num_attention_heads")
    if heads % key_heads:
        raise fields.unsupported(f"{heads} query heads over {key_heads} key heads")
    # Unified models have no second embedding, whatever the defaults say.
    unified = any("Unified" in str(name) for name in raw.get("architectures") or ())
    columns = 0
    if not unified:
        columns = raw.get("hidden_size_per_layer_input") or 0
    shared = _shared_layers(fields, full)
    intermediate = fields.integer("intermediate_size")
    wide = shared if raw.get("use_double_wide_mlp") else 0
    return GemmaLayers(
        full,
        key_heads,
        head_dim,
        bool(raw.get("attention_k_eq_v")),
        shared,
        (intermediate,) * (layers - wide) + (2 * intermediate,) * wide,
        columns,
        fields.integer("vocab_size_per_layer_input") if columns else 0,
    )


def _read_gemma3n(fields: ConfigFields, layers: int) -> GemmaLayers:
    raw = fields.raw
    full = _full_layers(fields, layers)
    intermediates = raw.get("intermediate_size")
    if not isinstance(intermediates, list):
        intermediates = [intermediates] * layers
    if len(intermediates) != layers:
        raise ModelInvalid(f"{fields.name}: intermediate_size is not a list of {layers} numbers.")
    streams = fields.integer("altup_num_inputs")
    active = raw.get("altup_active_idx")
    if active or not 1 < streams <= _MAX_STREAMS:
        raise fields.unsupported(f"{streams} streams of the residual, of which {active} is active")
    return GemmaLayers(
        full,
        fields.integer("num_key_value_heads"),
        fields.integer("head_dim"),
        values_are_keys=False,
        shared=_shared_layers(fields, full),
        intermediates=tuple(
            fields.integer("intermediate_size", within={"intermediate_size": columns})
            for columns in intermediates
        ),
        input_columns=fields.integer("hidden_size_per_layer_input"),
        input_vocabulary=fields.integer("vocab_size_per_layer_input"),
        altup=AltUp(
            streams,
            fields.integer("laurel_rank"),
            bool(raw.get("altup_correct_scale", True)),
            _sparsities(fields, layers),
        ),
    )


def _sparsities(fields: ConfigFields, layers: int) -> tuple[float, ...]:
    """Return the share of each layer's gates that become 0. Raises ModelInvalid."""
    shares = fields.raw.get("activation_sparsity_pattern")
    if shares is None:
        sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        return (_SPARSITY,) * sparse + (0.0,) * (layers - sparse)
    if (
        not isinstance(shares, list)
        or len(shares) != layers
        or not all(isinstance(share, int | float) and 0.0 <= share < 1.0 for share in shares)
    ):
        raise ModelInvalid(
            f"{fields.name}: activation_sparsity_pattern is not a list of {layers} shares."
        )
    return tuple(map(float, shares))


def _full_layers(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Return whether each layer sees the full context, without a window."""
    kinds = fields.kinds_of_layers("layer_types", layers, _KINDS)
    if kinds is None:
        pattern = fields.integer("sliding_window_pattern")
        return tuple((layer + 1) % pattern == 0 for layer in range(layers))
    return tuple(kind == _KINDS[1] for kind in kinds)


def _shared_layers(fields: ConfigFields, full: tuple[bool, ...]) -> int:
    """Return the number of last layers that read keys and values of earlier ones. Raises ModelInvalid."""
    shared = fields.raw.get("num_kv_shared_layers") or 0
    if shared and {*full[: max(len(full) - shared, 0)]} != {*full}:
        raise fields.unsupported("layers that read keys of a kind of layer that is missing")
    return int(shared)


def _full_shape(fields: ConfigFields, full: tuple[bool, ...]) -> tuple[int, int]:
    """Return the key heads and their columns in layers without a window. Raises ModelInvalid."""
    key_heads = fields.integer("num_key_value_heads")
    # transformers 5 states the shapes layer by layer.
    sections = fields.section("per_layer_config")
    if not sections:
        raw = fields.raw
        if raw.get("attention_k_eq_v") and raw.get("num_global_key_value_heads"):
            key_heads = fields.integer("num_global_key_value_heads")
        return key_heads, fields.integer("global_head_dim", 512)
    numbers = [str(layer) for layer, is_full in enumerate(full) if is_full]
    shapes = {
        (
            fields.integer("num_key_value_heads", key_heads, fields.section(number, sections)),
            fields.integer("head_dim", within=fields.section(number, sections)),
        )
        for number in numbers
    }
    if len(shapes) != 1 or {*sections} != {*numbers}:
        raise fields.unsupported("layers of more than two shapes of heads")
    return shapes.pop()
