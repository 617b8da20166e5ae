"""Names of an architecture's tensors in a checkpoint, by their part in a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Checkpoint names of a layer's experts, as they follow `Names.layer`."""

    router: str
    gate_up: tuple[str, str]
    """Linear layers of an expert, with braces for its number."""
    down: str
    shared: tuple[tuple[str, ...], str] | None = None
    """Linear layers of a shared expert: gate and up, or both as one, and down."""
    shared_gate: str = ""
    """Empty: tokens take the shared expert as it is."""
    interleaved: str = ""
    """Prefix of the tensors, where one holds all experts (interleaved_experts.py), in place of those names."""
    stacked: tuple[str, str] | None = None
    """Tensors of all experts that a checkpoint may have in place of numbered layers: gate with up, and down."""
    correction: str = ""
    """Of sigmoids by which experts are chosen; empty: there is none."""
    scales: tuple[str, str] | None = None
    """Factors of the columns that the router reads, whose norm has no weight, and of each expert's output."""


@dataclass(frozen=True, slots=True)
class DeltaNetNames:
    """Checkpoint names of a layer's delta net, as they follow `Names.layer`."""

    ba: tuple[str, ...]
    """Linear layers of b and a. They stay floating, and join `qkvz` if that is."""
    conv: str = "linear_attn.conv1d.weight"
    a_log: str = "linear_attn.A_log"
    dt_bias: str = "linear_attn.dt_bias"
    norm: str = "linear_attn.norm.weight"


@dataclass(frozen=True, slots=True)
class AltUpNames:
    """Checkpoint names of alternating updates: of a layer, as they follow `Names.layer`, and of the streams."""

    router: str = "altup.modality_router"
    norm: str = "altup.router_norm.weight"
    prediction: str = "altup.prediction_coefs"
    correction: str = "altup.correction_coefs"
    scale: str = "altup.correct_output_scale"
    begin: str = "model.altup_projections.{}"
    """Linear layers that make each stream but the first of the embeddings, with braces for its number."""
    end: str = "model.altup_unembed_projections.{}"


@dataclass(frozen=True, slots=True)
class Names:
    """Checkpoint names of an architecture's tensors."""

    embedding: str
    last_norm: str
    head: str
    layer: str
    """Prefix of a layer's tensors, with braces for its number."""
    norms: Mapping[str, str]
    merged: Mapping[str, tuple[str, ...]]
    """Linear layers (without `.weight`) of each gemm, in output order; one alone is stored merged."""
    biased: frozenset[str] = frozenset()
    """Gemms with a bias."""
    norm_offset: float = 0.0
    """Added to the weights of norms, which then stay in fp32."""
    experts: ExpertNames | None = None
    """In place of `gate_up` and `down`."""
    sinks: str = ""
    """Of attention; empty: there are none."""
    delta_net: DeltaNetNames | None = None
    orders: Mapping[str, Callable[..., torch.Tensor]] = dataclasses.field(default_factory=dict)
    """Functions of the ModelConfig, by gemm: rows of the checkpoint in the order of computation, int64 [N]."""
    floating: frozenset[str] = frozenset()
    """Gemms whose weights are never rounded."""
    scale: str = ""
    """Number by which a layer multiplies the residual; empty: there is none."""
    kv: str = ""
    """Linear layer that makes keys and values of a latent; empty: there is none."""
    inputs: tuple[str, str, str] | None = None
    """Of a second embedding that each layer reads: its table, projection and norm."""
    altup: AltUpNames | None = None
