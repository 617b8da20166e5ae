"""Reads layers with a running state, which replace attention in hybrid models. Imports no torch.

Letters: G key heads and H value heads of a layer, K and V their columns. In a Mamba 2, G are groups, K is the
size of the state, and keys and queries are B and C. A short convolution has one head of V values and no keys.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

from localchat_cuda.config.fields import ConfigFields

RecurrentKind = Literal["delta_net", "mamba", "short_conv"]

TAPS = 4
"""Tokens that the convolution of a delta net or a Mamba 2 covers, including the current one."""
_DIMENSIONS = (16, 32, 64, 128)
_MAX_TAPS = 4
_NO_LIMITS = [0.0, inf], [0.0, {"__float__": "Infinity"}]
"""Limits on the time steps of a Mamba 2 that limit nothing. The second is how transformers writes them."""
_DELTA_NETS = {"linear_attention": "recurrent", "full_attention": "attention"}
_KINDS = {
    "delta_net": _DELTA_NETS,
    "mamba": _DELTA_NETS
    | {"mamba": "recurrent", "attention": "attention", "mlp": "mlp", "moe": "moe"},
    "short_conv": {"conv": "recurrent", "full_attention": "attention"},
}
"""Layers of config.json by what they are. An MLP and experts among them are layers of their own."""


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Layers with a running state: a convolution over a few tokens, and a matrix for each value head."""

    kind: RecurrentKind
    layers: tuple[bool, ...]
    """Whether each layer has a state."""
    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values, a multiple of `key_heads`. Neighboring heads share a key head."""
    key_dim: int
    value_dim: int
    taps: int = TAPS
    """Tokens that the convolution covers, including the current one."""
    biased: bool = False
    """The convolution has a bias."""
    eps: float = 0.0
    """Number added to the variance of the output's norm; 0.0: that of the model's norms."""

    @property
    def count(self) -> int:
        """Number of layers with a state."""
        return sum(self.layers)

    @property
    def values(self) -> int:
        """Columns of the values: H * V."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Columns that the convolution reads: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def parts(self) -> tuple[int, ...]:
        """Columns of the parts of the merged gemm: channels and gates, and the time steps of a Mamba 2."""
        if self.kind == "delta_net":
            return self.channels, self.values
        if self.kind == "mamba":
            return self.values, self.channels, self.value_heads
        return self.values, self.values, self.values

    @property
    def columns(self) -> int:
        """Columns of the merged gemm."""
        return sum(self.parts)

    def extra_numbers(self, hidden: int) -> int:
        """Return the weights of a layer besides its linear layers. `hidden`: columns of the residual."""
        convolution = self.channels * (self.taps + self.biased)
        if self.kind == "delta_net":
            return convolution + 2 * self.value_heads * (hidden + 1) + self.value_dim
        if self.kind == "mamba":
            return convolution + 3 * self.value_heads + self.values
        return convolution

    def state_bytes(self, number_bytes: int) -> int:
        """Return the bytes of a sequence's state in all layers. `number_bytes`: of a convolution's input."""
        matrix = 4 * self.value_heads * self.key_dim * self.value_dim
        return self.count * (matrix + (self.taps - 1) * self.channels * number_bytes)


def read_kinds(fields: ConfigFields, kind: RecurrentKind, layers: int) -> tuple[str, ...] | None:
    """Return "recurrent", "attention", "mlp" or "moe" for each layer of a hybrid. Raises ModelInvalid.

    None: the config does not list its layers."""
    kinds = fields.kinds_of_layers("layer_types", layers, _KINDS[kind])
    return kinds and tuple(_KINDS[kind][name] for name in kinds)


def read_recurrent(fields: ConfigFields, kind: RecurrentKind, layers: int) -> Recurrent | None:
    """Read the layers with a state; None: all layers have attention. Raises ModelInvalid without a kernel."""
    kinds = read_kinds(fields, kind, layers)
    if kinds is None and kind == "delta_net":
        interval = fields.integer("full_attention_interval", 4)
        has_state = tuple((layer + 1) % interval != 0 for layer in range(layers))
    else:
        has_state = tuple(layer == "recurrent" for layer in kinds or ("recurrent",) * layers)
    if not any(has_state):
        return None
    # The cache counts tokens in pages of keys and values.
    if all(has_state) or (kinds and "attention" not in kinds):
        raise fields.unsupported("running states in all layers, and attention in none")
    if kind == "short_conv":
        return _read_short_conv(fields, has_state)
    read = _read_mamba if kind == "mamba" else _read_delta_net
    recurrent = read(fields, has_state)
    if recurrent.taps != TAPS:
        raise fields.unsupported(f"convolutions over {recurrent.taps} tokens (supported: {TAPS})")
    if recurrent.value_heads % recurrent.key_heads:
        raise fields.unsupported(
            f"{recurrent.value_heads} value heads, which are not a multiple of {recurrent.key_heads} key heads"
        )
    value_dimensions = range(16, 129, 16) if kind == "mamba" else _DIMENSIONS
    fields.check_columns(recurrent.key_dim, "running states", _DIMENSIONS)
    fields.check_columns(recurrent.value_dim, "running states", value_dimensions)
    return recurrent


def _read_delta_net(fields: ConfigFields, layers: tuple[bool, ...]) -> Recurrent:
    return Recurrent(
        "delta_net",
        layers,
        fields.integer("linear_num_key_heads", 16),
        fields.integer("linear_num_value_heads", 32),
        fields.integer("linear_key_head_dim", 128),
        fields.integer("linear_value_head_dim", 128),
        fields.integer("linear_conv_kernel_dim", TAPS),
    )


def _read_mamba(fields: ConfigFields, layers: tuple[bool, ...]) -> Recurrent:
    """Read a Mamba 2, whose fields have the names of Granite 4 and Bamba."""
    raw = fields.raw
    activation = raw.get("mamba_hidden_act") or raw.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise fields.unsupported(f"Mamba layers with the activation {activation}")
    if raw.get("mamba_proj_bias"):
        raise fields.unsupported("biases in the projections of Mamba layers")
    limits = raw.get("time_step_limit")
    if limits is not None and limits not in _NO_LIMITS:
        raise fields.unsupported(f"time steps limited to {limits}")
    heads = fields.integer("mamba_n_heads", 128)
    inner = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    head_dim = inner // heads
    if raw.get("mamba_d_head") not in (None, "auto"):
        head_dim = fields.integer("mamba_d_head")
    return Recurrent(
        "mamba",
        layers,
        fields.integer("mamba_n_groups", 1),
        heads,
        fields.integer("mamba_d_state", 256),
        head_dim,
        fields.integer("mamba_d_conv", TAPS),
        bool(raw.get("mamba_conv_bias", True)),
        fields.number("rms_norm_eps", 1e-6),
    )


def _read_short_conv(fields: ConfigFields, layers: tuple[bool, ...]) -> Recurrent:
    """Read the convolutions of an LFM2, which cover all columns of the residual."""
    taps = fields.integer("conv_L_cache", 3)
    if not 2 <= taps <= _MAX_TAPS:
        raise fields.unsupported(f"convolutions over {taps} tokens (supported: 2 to {_MAX_TAPS})")
    if fields.raw.get("conv_bias"):
        raise fields.unsupported("biases in the layers with convolutions")
    return Recurrent("short_conv", layers, 0, 1, 0, fields.integer("hidden_size"), taps)
