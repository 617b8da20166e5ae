"""Weights, states and step of a gated delta net or a Mamba 2, as their kernels read them.

Letters, in all modules of this folder: T tokens of the step, S sequences, P partial sums of a gemm, G key
heads, H value heads (a multiple of G), K and V columns of a key and a value, C channels of the convolution (2 G
K + H V), E entries of the states: a running sequence has the one of its slot.

Channels are queries, keys and values, and values, keys and queries in a Mamba 2. It calls them C, B and x.
"""

from typing import NamedTuple

import torch

from localchat_cuda.kernels.attention.reference import AttentionBatch, require_batch
from localchat_cuda.kernels.launch import require

TAPS = 4
"""Tokens that the convolution sees, its own among them."""
CHUNK = 64
"""Tokens of a chunk."""
_COLUMNS = 32
"""Columns of a state in one program."""


class DeltaNetWeights(NamedTuple):
    """Weights of one layer besides its gemms."""

    conv: torch.Tensor
    """[C, TAPS] in the model's dtype; the last tap is that of the token itself."""
    decay: torch.Tensor
    """fp32 [H]: the logarithm of the decay is this times softplus(a + dt_bias); below 0."""
    dt_bias: torch.Tensor
    """fp32 [H]."""
    norm: torch.Tensor
    """[V]: of the output of each head; [H V] in a Mamba 2."""
    bias: torch.Tensor | None = None
    """[C]: of the convolution; None: it has none."""
    skip: torch.Tensor | None = None
    """fp32 [H]: factor of a Mamba 2's values, which join the output; None: a delta net."""


class LayerStates(NamedTuple):
    """States of one layer."""

    matrices: torch.Tensor
    """fp32 [E, H, K, V]."""
    inputs: torch.Tensor
    """[E, TAPS - 1, C] in the model's dtype: last inputs of the convolution, the oldest first."""

    @property
    def key_heads(self) -> int:
        """G."""
        _, h, k, v = self.matrices.shape
        return (self.inputs.shape[2] - h * v) // (2 * k)


class Projection(NamedTuple):
    """Products of a layer's input: partial sums, fp32, fp16 or bf16, with dense columns."""

    qkvz: torch.Tensor
    """[P, T, at least C]: the channels."""
    ba: torch.Tensor
    """[P', T, 2 H]: b and a of each value head; [P', T, H]: the time steps of a Mamba 2."""


class Tokens(NamedTuple):
    """Places of a step's tokens, int32 [T]."""

    slots: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    """Tokens of the same sequence that come before it in this step."""


class Prepared(NamedTuple):
    """Inputs per token of the rule that changes states."""

    x: torch.Tensor
    """[T, C] in the model's dtype. A delta net's q and k have length 1 and K^-1/2."""
    decay: torch.Tensor
    """fp32 [T, H]: logarithm of the factor of the state."""
    beta: torch.Tensor
    """fp32 [T, H]: factor of the values, the time step of a Mamba 2."""

    @staticmethod
    def empty(t: int, c: int, h: int, dtype: torch.dtype, device: torch.device) -> "Prepared":
        """Room for T tokens."""
        x = torch.empty(t, c, dtype=dtype, device=device)
        return Prepared(x, *torch.empty(2, t, h, device=device).unbind(0))


class Source(NamedTuple):
    """Partial sums qkvz as kernels read them, and the distances of their parts and rows."""

    qkvz: torch.Tensor
    part_stride: int
    row_stride: int

    @staticmethod
    def of(qkvz: torch.Tensor) -> "Source":
        return Source(qkvz, qkvz.stride(0), qkvz.stride(1))


class DeltaShape(NamedTuple):
    """Constants of the kernels."""

    G: int
    H: int
    K: int
    V: int
    BV: int
    """Columns of a state in a program."""
    TAPS: int
    P: int
    """Partial sums."""
    DELTA: bool
    """The rule is a delta net's. Otherwise it is a Mamba 2's."""
    Q0: int
    K0: int
    V0: int
    """First channels of queries, keys and values."""

    @staticmethod
    def of(states: LayerStates, parts: int, *, delta: bool) -> "DeltaShape":
        """Return the constants of a layer. `parts`: partial sums."""
        _, h, k, v = states.matrices.shape
        g = states.key_heads
        firsts = (0, g * k, 2 * g * k) if delta else (h * v + g * k, h * v, 0)
        # The widest power of two that divides the columns.
        columns = min(_COLUMNS, v & -v)
        return DeltaShape(g, h, k, v, columns, TAPS, parts, delta, *firsts)


class ChunkedPart(NamedTuple):
    """Sequences of many new tokens in a step, which are computed in chunks."""

    batch: AttentionBatch
    chunks: torch.Tensor
    """int32 [chunks, 2]: sequence of the batch, and number of the chunk in it; (-1, 0) is none."""


def require_states(states: LayerStates, x: torch.Tensor) -> tuple[int, int, int]:
    """Return H, K and V of the states. Raises ValueError unless their layers have channels x [T, C]."""
    matrices, inputs = states
    require("matrices", matrices, (None, None, None, None), x.device, torch.float32)
    e, h, k, v = matrices.shape
    require("inputs", inputs, (e, TAPS - 1, x.shape[1]), x.device, x.dtype)
    if (x.shape[1] - h * v) % (2 * k) or h % max(1, states.key_heads):
        raise ValueError(f"inputs: {x.shape[1]} channels are none of {h} heads of {k} and {v}")
    return h, k, v


def require_projection(
    projection: Projection, t: int, columns: int, gates: int, device: torch.device
) -> None:
    """Raise ValueError unless the products have `columns` columns and `gates` columns of gates."""
    for name, min_columns in (("qkvz", columns), ("ba", gates)):
        weight = getattr(projection, name)
        require(name, weight, (None, t, None), device, contiguous=False)
        if weight.shape[2] < min_columns:
            raise ValueError(
                f"{name}: at least {min_columns} columns wanted, {weight.shape[2]} given"
            )


def require_rule(
    prepared: Prepared,
    projection: Projection,
    states: LayerStates,
    batch: AttentionBatch,
    out: torch.Tensor,
    skip: torch.Tensor | None,
) -> tuple[int, int, int, int]:
    """Return S, and H, K and V of the states. Raises ValueError unless a rule can read all of these."""
    t, c = prepared.x.shape
    device = out.device
    h, k, v = require_states(states, prepared.x)
    require("x", prepared.x, (t, None), device)
    require("decay", prepared.decay, (t, h), device, torch.float32)
    require("beta", prepared.beta, (t, h), device, torch.float32)
    require_projection(projection, t, c, 0, device)
    require("out", out, (t, h, v), device)
    if skip is not None:
        require("skip", skip, (h,), device, torch.float32)
    return require_batch(batch, device), h, k, v
