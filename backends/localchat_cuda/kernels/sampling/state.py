"""Inputs and workspace of the sampler's kernels: per-slot settings, known tokens, scratch (see sample.py)."""

from dataclasses import dataclass

import torch
import triton.language as tl

from localchat_cuda.kernels.launch import require

BLOCK = 1024
CANDIDATES = 16384
NOTHING = -1
FIELDS = (
    "inverse_temperature",
    "reach",
    "typical_p",
    "top_p",
    "drop",
    "repetition",
    "frequency",
    "presence",
)
"""Columns of `SamplingTensors.floats`. inverse_temperature: float32(1 / temperature), 0.0 for greedy.
reach: how far below the best a candidate can still win, REACH * temperature, inf with typical-p.
drop: ln(min_p), -inf for none."""
SEEN = tl.constexpr(1 << 30)
DEPTHS = tl.constexpr(16)
DEEPEST = tl.constexpr(16.0)
BLOCK_ROWS = tl.constexpr(6 + 16)
"""Rows of `Scratch.blocks`: raw maximum and mass, processed maximum and mass, score and id of the
block's winner, and the count within each depth: tokens if there is a top-k, else mass."""
FRACTION = tl.constexpr(1099511627776.0)
LARGEST = tl.constexpr(3.4028234663852886e38)
LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
HIGHEST = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Sampling settings of each slot."""

    floats: torch.Tensor
    """fp32 [S, 8], columns FIELDS."""
    top_k: torch.Tensor
    """int32 [S]; 0: off."""
    keys: torch.Tensor
    """int64 [S]: `gumbel.draw_key` before its last step, mix(mix(seed + G) ^ choice + G)."""
    bias_counts: torch.Tensor
    """int32 [S]."""
    bias_ids: torch.Tensor
    """int32 [S, width]."""
    bias_values: torch.Tensor
    """fp32 [S, width]."""

    @staticmethod
    def empty(slots: int, bias: int, device: torch.device) -> "SamplingTensors":
        def whole(*extents: int) -> torch.Tensor:
            return torch.zeros(*extents, dtype=torch.int32, device=device)

        return SamplingTensors(
            torch.zeros(slots, len(FIELDS), device=device),
            whole(slots),
            torch.zeros(slots, dtype=torch.int64, device=device),
            whole(slots),
            whole(slots, bias),
            torch.zeros(slots, bias, device=device),
        )


@dataclass(frozen=True, slots=True)
class PenaltyTokens:
    """Tokens that penalties count."""

    tokens: torch.Tensor
    """int32 [T, context]: known tokens, a text a row."""
    texts: torch.Tensor
    """int32 [P]: the text of each draw."""
    prompts: torch.Tensor
    """int32 [S]: how many of a slot's tokens are prompt."""
    counts: torch.Tensor
    """int32 [P, V]: scratch."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Workspace for P draws."""

    z: torch.Tensor
    blocks: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def empty(draws: int, vocabulary: int, device: torch.device) -> "Scratch":
        return Scratch(
            torch.empty(draws, vocabulary, device=device),
            torch.empty(draws, BLOCK_ROWS.value, -(-vocabulary // BLOCK), device=device),
            torch.empty(draws, CANDIDATES, device=device),
            torch.empty(draws, CANDIDATES, dtype=torch.int32, device=device),
            torch.empty(draws, dtype=torch.int32, device=device),
        )


def check(
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    settings: SamplingTensors,
    scratch: Scratch,
) -> None:
    """Raise ValueError with the name of an argument that the kernels cannot read."""
    vocabulary, device = logits.shape[1], logits.device
    draws, slot_count = rows.shape[0], settings.top_k.shape[0]
    whole = (torch.int32,)
    require(
        "logits", logits, (None, vocabulary), (torch.float32, torch.float16, torch.bfloat16), device
    )
    for name, tensor in (("rows", rows), ("slots", slots), ("positions", positions)):
        require(name, tensor, (draws,), whole, device)
    require("settings.floats", settings.floats, (slot_count, len(FIELDS)), (torch.float32,), device)
    require("settings.top_k", settings.top_k, (slot_count,), whole, device)
    require("settings.keys", settings.keys, (slot_count,), (torch.int64,), device)
    require("settings.bias_ids", settings.bias_ids, (slot_count, None), whole, device)
    require("scratch.z", scratch.z, (draws, vocabulary), (torch.float32,), device)
    require(
        "scratch.blocks",
        scratch.blocks,
        (draws, BLOCK_ROWS.value, -(-vocabulary // BLOCK)),
        (torch.float32,),
        device,
    )
    require("scratch.values", scratch.values, (draws, CANDIDATES), (torch.float32,), device)
