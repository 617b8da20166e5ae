"""Reads what layers of a Gemma 4 have of their own from config.json. Imports no torch.

Layers without a window have wider and fewer key heads, whose values may be the keys before their norm. The last
layers of small models read the keys and values of the last earlier layer of their kind, and all layers of them
read a second embedding of each token.
"""

from dataclasses import dataclass

from localchat.errors import ModelInvalid
from localchat_cuda.config_fields import ConfigFields

HEAD_DIMENSIONS = (64, 96, 128, 256, 512)
"""Possible in layers without a window."""
_KINDS = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class Gemma4:
    """Layers of a Gemma 4, where they differ."""

    full: tuple[bool, ...]
    """By layer, whether it has no window."""
    key_heads: int
    """Of layers without a window."""
    head_dim: int
    """The same."""
    values_are_keys: bool
    """Layers without a window have no projection of values."""
    shared: int
    """Last layers that read the keys and values of earlier ones."""
    intermediate: int
    """Columns inside the MLP, beside which a layer may have experts."""
    wide: bool
    """The MLP of the last ones has twice the columns."""
    input_columns: int
    """Of the embedding that each layer reads; 0: there is none."""
    input_vocabulary: int
    """Rows of it."""

    def reads_earlier(self, layer: int) -> bool:
        """True if a layer has no keys and values of its own."""
        return layer >= len(self.full) - self.shared

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        if not self.reads_earlier(layer):
            return layer
        own = range(len(self.full) - self.shared)
        return next(each for each in reversed(own) if self.full[each] == self.full[layer])

    def projections(self, layer: int) -> int:
        """How many of keys and values a layer projects."""
        if self.reads_earlier(layer):
            return 0
        return 1 if self.values_are_keys and self.full[layer] else 2

    def keep(self, layers: tuple[int, ...]) -> "Gemma4":
        """The same with only some of the layers; each kind that is read must be among them."""
        return Gemma4(
            tuple(self.full[each] for each in layers),
            self.key_heads,
            self.head_dim,
            self.values_are_keys,
            sum(map(self.reads_earlier, layers)),
            self.intermediate,
            self.wide,
            self.input_columns,
            self.input_vocabulary,
        )


def read_gemma4(fields: ConfigFields, layers: int) -> Gemma4:
    """The differences between the layers of a config. Raises ModelInvalid."""
    raw = fields.raw
    kinds = raw.get("layer_types") or [_KINDS[(n + 1) % 6 == 0] for n in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or {*kinds} - {*_KINDS}:
        raise ModelInvalid(f"{fields.name}: layer_types is no list of {layers} known kinds.")
    full = tuple(kind == _KINDS[1] for kind in kinds)
    key_heads, head_dim = _full_shape(fields, full)
    if head_dim not in HEAD_DIMENSIONS:
        known = ", ".join(map(str, HEAD_DIMENSIONS))
        raise fields.unsupported(f"heads of {head_dim} columns ({known} are possible)")
    heads = fields.integer("num_attention_heads")
    if heads % key_heads:
        raise fields.unsupported(f"{heads} query heads over {key_heads} key heads")
    shared = raw.get("num_kv_shared_layers") or 0
    if shared and {*full[: layers - shared]} != {*full}:
        raise fields.unsupported("layers that read keys of a kind of layer that is not there")
    unified = any("Unified" in str(each) for each in raw.get("architectures") or ())
    columns = 0 if unified else raw.get("hidden_size_per_layer_input") or 0
    return Gemma4(
        full,
        key_heads,
        head_dim,
        bool(raw.get("attention_k_eq_v")),
        shared,
        fields.integer("intermediate_size"),
        bool(raw.get("use_double_wide_mlp")),
        columns,
        fields.integer("vocab_size_per_layer_input") if columns else 0,
    )


def _full_shape(fields: ConfigFields, full: tuple[bool, ...]) -> tuple[int, int]:
    """Key heads and their columns in layers without a window: transformers 5 states them layer by layer."""
    keys = fields.integer("num_key_value_heads")
    held = fields.section("per_layer_config")
    if not held:
        few = fields.raw.get("attention_k_eq_v") and fields.raw.get("num_global_key_value_heads")
        own = fields.integer("num_global_key_value_heads") if few else keys
        return own, fields.integer("global_head_dim", 512)
    found = {
        (
            fields.integer("num_key_value_heads", keys, within=fields.section(str(n), held)),
            fields.integer("head_dim", within=fields.section(str(n), held)),
        )
        for n, each in enumerate(full)
        if each
    }
    if len(found) != 1 or {*held} != {str(n) for n, each in enumerate(full) if each}:
        raise fields.unsupported("layers of more than two shapes of heads")
    return found.pop()
