"""Reads the gated delta nets of a hybrid model from config.json. Imports no torch.

Letters: G key heads and H value heads of a net, DK and DV their columns.
"""

from dataclasses import dataclass

from localchat_cuda.config.fields import ConfigFields

TAPS = 4
"""Tokens that a short convolution covers, including the current one."""
_DIMENSIONS = (16, 32, 64, 128)
_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta nets, which replace attention in some layers."""

    layers: tuple[bool, ...]
    """Whether each layer has a delta net."""
    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values, a multiple of `key_heads`. Neighboring heads share a key head."""
    key_dim: int
    value_dim: int

    @property
    def count(self) -> int:
        """Number of layers with a delta net."""
        return sum(self.layers)

    @property
    def values(self) -> int:
        """Columns of the values: H * DV."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Columns that the convolution reads: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def columns(self) -> int:
        """Columns of the merged gemm: the channels, and the output's gate."""
        return self.channels + self.values

    def layer_bytes(self, number_bytes: int) -> int:
        """Return the bytes of a sequence's state in one layer. `number_bytes`: of a convolution's input."""
        matrix = 4 * self.value_heads * self.key_dim * self.value_dim
        return matrix + (TAPS - 1) * self.channels * number_bytes

    def state_bytes(self, number_bytes: int) -> int:
        """Return the bytes of a sequence's state in all layers."""
        return self.count * self.layer_bytes(number_bytes)


def read_delta_net(fields: ConfigFields, layers: int) -> DeltaNet:
    """Read the delta nets of a config. Raises ModelInvalid for shapes without a kernel."""
    kinds = fields.kinds_of_layers("layer_types", layers, _KINDS)
    if kinds is None:
        interval = fields.integer("full_attention_interval", 4)
        kinds = tuple(_KINDS[(layer + 1) % interval == 0] for layer in range(layers))
    if all(kind == _KINDS[0] for kind in kinds):
        raise fields.unsupported("delta nets in all layers, and attention in none")
    taps = fields.integer("linear_conv_kernel_dim", TAPS)
    if taps != TAPS:
        raise fields.unsupported(f"convolutions over {taps} tokens (supported: {TAPS})")
    net = DeltaNet(
        tuple(kind == _KINDS[0] for kind in kinds),
        fields.integer("linear_num_key_heads", 16),
        fields.integer("linear_num_value_heads", 32),
        fields.integer("linear_key_head_dim", 128),
        fields.integer("linear_value_head_dim", 128),
    )
    if net.value_heads % net.key_heads:
        raise fields.unsupported(
            f"{net.value_heads} value heads, which are not a multiple of {net.key_heads} key heads"
        )
    for columns in (net.key_dim, net.value_dim):
        if columns not in _DIMENSIONS:
            supported = ", ".join(map(str, _DIMENSIONS))
            raise fields.unsupported(f"delta nets of {columns} columns (supported: {supported})")
    return net
