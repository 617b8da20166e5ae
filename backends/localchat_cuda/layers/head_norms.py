"""Weights of attention besides its gemms. A module of its own because architectures import no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights of the norms of queries and keys: [D] per head, or [H*D] and [J*D] over all heads."""

    q: torch.Tensor
    k: torch.Tensor
    values: bool = False
    """Values are normed per head, too, without weights."""

    @classmethod
    def of(cls, norms: Mapping[str, torch.Tensor]) -> HeadNorms | None:
        """Return the norms of a layer with these weights; None: queries and keys are not normed."""
        if "q_norm" not in norms:
            return None
        return cls(norms["q_norm"], norms["k_norm"])


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of a layer's attention besides its gemms."""

    bias: torch.Tensor | None = None
    """Bias of queries, keys and values, [(H + 2 J) * D]."""
    norms: HeadNorms | None = None
    sinks: torch.Tensor | None = None
    """[H]; see Rules."""
