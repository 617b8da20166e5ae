"""Reads how the layers of a Gemma 4 differ from each other. Imports no torch.

In small models the last layers read the keys and values of the last earlier layer of their kind, and all layers
read a second embedding of each token. Layers without a window have fewer and wider key heads, whose values may
be the keys before their norm.
"""

from dataclasses import dataclass, replace

from localchat_cuda.architectures.family import Family
from localchat_cuda.config.fields import ConfigFields

HEAD_DIMENSIONS = (64, 96, 128, 256, 512)
"""Supported head dimensions of layers without a window."""
_KINDS = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class GemmaLayers:
    """Differences between the layers of a Gemma 4."""

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
        return replace(
            self,
            full=tuple(self.full[n] for n in layers),
            shared=sum(map(self.reads_earlier, layers)),
            intermediates=tuple(self.intermediates[n] for n in layers),
        )


def read_gemma(fields: ConfigFields, family: Family, layers: int) -> GemmaLayers | None:
    """Read the differences between a model's layers; None for other families. Raises ModelInvalid."""
    if family.names.inputs is None:
        return None
    raw = fields.raw
    full = _full_layers(fields, layers)
    key_heads, head_dim = _full_shape(fields, full)
    fields.check_columns(head_dim, "heads", HEAD_DIMENSIONS)
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
