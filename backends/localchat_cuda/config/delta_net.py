"""Reads the gated delta nets of a hybrid model from config.json. Imports no torch.

Letters: G key heads and H value heads of a net, DK and DV their columns.
"""

from dataclasses import dataclass

from localchat.errors import ModelInvalid
from localchat_cuda.config.fields import ConfigFields

TAPS = 4
"""Tokens that a short convolution sees, its own among them."""
_DIMENSIONS = (16, 32, 64, 128)
_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta nets, in place of attention in some layers."""

    layers: tuple[bool, ...]
    """By layer, whether it has one."""
    key_heads: int
    """Of queries and keys."""
    value_heads: int
    """A multiple of `key_heads`; neighbours share a key head."""
    key_dim: int
    value_dim: int

    @property
    def count(self) -> int:
        """Layers that have one."""
        return sum(self.layers)

    @property
    def values(self) -> int:
        """Columns of the values: H * DV."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Columns that the convolution sees: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def columns(self) -> int:
        """Columns of the merged gemm: the channels, and the output's gate."""
        return self.channels + self.values

    def layer_bytes(self, number_bytes: int) -> int:
        """Bytes of one sequence's state in one layer, with inputs of the convolution in `number_bytes` each."""
        matrix = 4 * self.value_heads * self.key_dim * self.value_dim
        return matrix + (TAPS - 1) * self.channels * number_bytes

    def state_bytes(self, number_bytes: int) -> int:
        """The same in all layers."""
        return self.count * self.layer_bytes(number_bytes)


def read_delta_net(fields: ConfigFields, layers: int) -> DeltaNet:
    """The delta nets of a config, and which layers have them. Raises ModelInvalid."""
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        interval = fields.integer("full_attention_interval", 4)
        kinds = [_KINDS[(layer + 1) % interval == 0] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelInvalid(f"{fields.name}: layer_types is no list of {layers} kinds.")
    for kind in kinds:
        if kind not in _KINDS:
            raise fields.unsupported(f"layers of kind {kind}")
    if all(kind == _KINDS[0] for kind in kinds):
        raise fields.unsupported("delta nets in all layers, and attention in none")
    taps = fields.integer("linear_conv_kernel_dim", TAPS)
    if taps != TAPS:
        raise fields.unsupported(f"convolutions over {taps} tokens ({TAPS} are possible)")
    found = DeltaNet(
        tuple(kind == _KINDS[0] for kind in kinds),
        fields.integer("linear_num_key_heads", 16),
        fields.integer("linear_num_value_heads", 32),
        fields.integer("linear_key_head_dim", 128),
        fields.integer("linear_value_head_dim", 128),
    )
    if found.value_heads % found.key_heads:
        raise fields.unsupported(
            f"{found.value_heads} value heads over {found.key_heads} key heads, of which they are no multiple"
        )
    for columns in (found.key_dim, found.value_dim):
        if columns not in _DIMENSIONS:
            known = ", ".join(map(str, _DIMENSIONS))
            raise fields.unsupported(f"delta nets of {columns} columns ({known} are possible)")
    return found
