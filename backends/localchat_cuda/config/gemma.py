"""Reads what layers of a Gemma 3n or 4 have of their own from config.json. Imports no torch.

The last layers of small models read the keys and values of the last earlier layer of their kind, and all
layers of them read a second embedding of each token. In a Gemma 4 layers without a window have wider and fewer
key heads, whose values may be the keys before their norm. A Gemma 3n has several streams of its residual.
"""

from dataclasses import dataclass, replace
from statistics import NormalDist

from localchat.errors import ModelInvalid
from localchat_cuda.config.fields import ConfigFields
from localchat_cuda.supported_architectures import Architecture

HEAD_DIMENSIONS = (64, 96, 128, 256, 512)
"""Possible in layers without a window."""
_KINDS = ("sliding_attention", "full_attention")
_MOST_STREAMS = 8
_SPARSE_LAYERS = 10
_SPARSITY = 0.95
"""Of a Gemma 3n whose config names none, if it has more layers."""


@dataclass(frozen=True, slots=True)
class AltUp:
    """Streams of a residual, of which layers compute with the first and correct the others."""

    streams: int
    laurel_rank: int
    """Columns inside the low-rank product beside attention."""
    scaled: bool
    """A scale of its columns multiplies what a layer reads its part of the second embedding by."""
    sparsities: tuple[float, ...]
    """By layer, the share of an MLP's gates that are 0, as if they were normally distributed."""

    def cutoff(self, layer: int) -> float | None:
        """Standard deviations above their mean from which gates count; None: all do."""
        share = self.sparsities[layer]
        return NormalDist().inv_cdf(share) if share else None


@dataclass(frozen=True, slots=True)
class GemmaLayers:
    """Layers of a Gemma 3n or 4, where they differ."""

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
    intermediates: tuple[int, ...]
    """By layer, columns inside the MLP, beside which a layer may have experts."""
    input_columns: int
    """Of the embedding that each layer reads; 0: there is none."""
    input_vocabulary: int
    """Rows of it."""
    altup: AltUp | None = None

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

    def keep(self, layers: tuple[int, ...]) -> "GemmaLayers":
        """The same with only some of the layers; each kind that is read must be among them."""
        altup = self.altup
        if altup is not None:
            altup = replace(altup, sparsities=tuple(altup.sparsities[each] for each in layers))
        return replace(
            self,
            full=tuple(self.full[each] for each in layers),
            shared=sum(map(self.reads_earlier, layers)),
            intermediates=tuple(self.intermediates[each] for each in layers),
            altup=altup,
        )


def read_gemma(fields: ConfigFields, architecture: Architecture, layers: int) -> GemmaLayers | None:
    """The differences between a model's layers; None for other architectures. Raises ModelInvalid."""
    if architecture == "gemma3n":
        return _read_gemma3n(fields, layers)
    if architecture == "gemma4":
        return _read_gemma4(fields, layers)
    return None


def _read_gemma4(fields: ConfigFields, layers: int) -> GemmaLayers:
    raw = fields.raw
    full = _full_layers(fields, layers)
    key_heads, head_dim = _full_shape(fields, full)
    if head_dim not in HEAD_DIMENSIONS:
        known = ", ".join(map(str, HEAD_DIMENSIONS))
        raise fields.unsupported(f"heads of {head_dim} columns ({known} are possible)")
    heads = fields.integer("num_attention_heads")
    if heads % key_heads:
        raise fields.unsupported(f"{heads} query heads over {key_heads} key heads")
    unified = any("Unified" in str(each) for each in raw.get("architectures") or ())
    columns = 0 if unified else raw.get("hidden_size_per_layer_input") or 0
    shared = _shared_layers(fields, full)
    inner = fields.integer("intermediate_size")
    wide = shared if raw.get("use_double_wide_mlp") else 0
    return GemmaLayers(
        full,
        key_heads,
        head_dim,
        bool(raw.get("attention_k_eq_v")),
        shared,
        (inner,) * (layers - wide) + (2 * inner,) * wide,
        columns,
        fields.integer("vocab_size_per_layer_input") if columns else 0,
    )


def _read_gemma3n(fields: ConfigFields, layers: int) -> GemmaLayers:
    raw = fields.raw
    full = _full_layers(fields, layers)
    inner = raw.get("intermediate_size")
    shares = raw.get("activation_sparsity_pattern")
    inner = inner if isinstance(inner, list) else [inner] * layers
    if shares is None:
        sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        shares = [_SPARSITY] * sparse + [0.0] * (layers - sparse)
    if len(inner) != layers:
        raise ModelInvalid(f"{fields.name}: intermediate_size is no list of {layers} numbers.")
    if (
        not isinstance(shares, list)
        or len(shares) != layers
        or not all(isinstance(each, int | float) and 0.0 <= each < 1.0 for each in shares)
    ):
        raise ModelInvalid(
            f"{fields.name}: activation_sparsity_pattern is no list of {layers} shares."
        )
    streams = fields.integer("altup_num_inputs")
    active = raw.get("altup_active_idx")
    if active or not 1 < streams <= _MOST_STREAMS:
        raise fields.unsupported(f"{streams} streams of the residual, of which {active} is active")
    return GemmaLayers(
        full,
        fields.integer("num_key_value_heads"),
        fields.integer("head_dim"),
        values_are_keys=False,
        shared=_shared_layers(fields, full),
        intermediates=tuple(
            fields.integer("intermediate_size", within={"intermediate_size": each})
            for each in inner
        ),
        input_columns=fields.integer("hidden_size_per_layer_input"),
        input_vocabulary=fields.integer("vocab_size_per_layer_input"),
        altup=AltUp(
            streams,
            fields.integer("laurel_rank"),
            bool(raw.get("altup_correct_scale", True)),
            tuple(map(float, shares)),
        ),
    )


def _full_layers(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    """By layer, whether it has no window."""
    pattern = fields.integer("sliding_window_pattern")
    kinds = fields.raw.get("layer_types") or [_KINDS[(n + 1) % pattern == 0] for n in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or {*kinds} - {*_KINDS}:
        raise ModelInvalid(f"{fields.name}: layer_types is no list of {layers} known kinds.")
    return tuple(kind == _KINDS[1] for kind in kinds)


def _shared_layers(fields: ConfigFields, full: tuple[bool, ...]) -> int:
    """Last layers that read keys and values of earlier ones, of which there is one of each kind."""
    shared = fields.raw.get("num_kv_shared_layers") or 0
    if shared and {*full[: max(len(full) - shared, 0)]} != {*full}:
        raise fields.unsupported("layers that read keys of a kind of layer that is not there")
    return int(shared)


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
