"""Names of a family's tensors in a checkpoint, by their part in a layer. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from localchat_cuda.config.recurrent import RecurrentKind


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Checkpoint names of a layer's experts, after `Names.layer`."""

    router: str
    gate_up: tuple[str, ...]
    """Linear layers of an expert, gate and up or `up` alone, with braces for its number."""
    down: str
    shared: tuple[tuple[str, ...], str] | None = None
    """Linear layers of a shared expert: gate and up, or both as one, and down."""
    shared_gate: str = ""
    """Router of the shared expert; empty: the shared expert has a weight of 1."""
    interleaved: str = ""
    """Prefix of tensors with all experts (interleaved_experts.py), which replace those names."""
    stacked: tuple[str, str] | None = None
    """Tensors with all experts, gate with up and down, which may replace numbered layers."""
    correction: str = ""
    """Correction of the sigmoids that choose experts; empty: softmax chooses them."""
    scales: tuple[str, str] | None = None
    """Factors of the router's columns, whose norm has no weight, and of each expert's output."""


@dataclass(frozen=True, slots=True)
class RecurrentNames:
    """Checkpoint names of a layer with a running state, after `Names.layer`."""

    kind: RecurrentKind
    conv: str
    conv_bias: str = ""
    ba: tuple[str, ...] = ()
    """Linear layers of b and a. They stay floating, and join `in` if it is floating, too."""
    a_log: str = ""
    dt_bias: str = ""
    skip: str = ""
    norm: str = ""

    @classmethod
    def delta_net(cls, *ba: str) -> RecurrentNames:
        """Return the names of a Qwen's delta net, with these linear layers of b and a."""
        own = "linear_attn.conv1d.weight", "", ba, "linear_attn.A_log", "linear_attn.dt_bias", ""
        return cls("delta_net", *own, "linear_attn.norm.weight")

    @staticmethod
    def mamba_in_gguf(prefix: str) -> dict[str, str]:
        """Return the checkpoint names of a Mamba 2 by those of a GGUF file."""
        names = {
            "ssm_in": "in_proj",
            "ssm_out": "out_proj",
            "ssm_conv1d": "conv1d",
            "ssm_norm": "norm",
            "ssm_a": "A_log",
            "ssm_d": "D",
            "ssm_dt.bias": "dt_bias",
        }
        return {own: prefix + name for own, name in names.items()}

    @classmethod
    def mamba(cls, prefix: str) -> RecurrentNames:
        """Return the names of a Mamba 2 after a prefix."""
        own = "A_log", "dt_bias", "D", "norm.weight"
        conv = f"{prefix}conv1d.weight", f"{prefix}conv1d.bias"
        return cls("mamba", *conv, (), *(prefix + name for name in own))


@dataclass(frozen=True, slots=True)
class Names:
    """Checkpoint names of a family's tensors.

    Size: one field for each kind of tensor. Most families use the first six."""

    embedding: str
    last_norm: str
    head: str
    layer: str
    """Prefix of a layer's tensors, with braces for its number."""
    norms: Mapping[str, str]
    merged: Mapping[str, tuple[str, ...]]
    """Linear layers of each gemm, without `.weight`, in output order. A single one is stored merged."""
    biased: frozenset[str] = frozenset()
    """Gemms with a bias."""
    norm_offset: float = 0.0
    """Number added to the weights of norms, which then stay in fp32."""
    experts: ExpertNames | None = None
    """Experts, which replace `gate_up` and `down`."""
    sinks: str = ""
    """Sinks of attention; empty: attention has none."""
    recurrent: RecurrentNames | None = None
    orders: Mapping[str, Callable[..., torch.Tensor]] = dataclasses.field(default_factory=dict)
    """Functions of the ModelConfig: a gemm's rows in the order of computation, int64 [N]."""
    scale: str = ""
    """Number by which a layer multiplies the residual; empty: 1."""
    kv: str = ""
    """Linear layer from a latent to keys and values; empty: attention has no latents."""
    inputs: tuple[str, str, str] | None = None
    """Table, projection and norm of a second embedding that each layer reads."""
