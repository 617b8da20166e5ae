"""Inputs and workspace of the sampler's kernels: per-slot settings, known tokens, scratch (see sample.py)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from localchat.backend_api.sampling.gumbel import REACH
from localchat.backend_api.sampling.reference import GREEDY_BELOW
from localchat.backend_api.step import SamplingParams
from localchat.config.parameters import SAMPLERS
from localchat_cuda.kernels.launch import require

BLOCK = 1024
CANDIDATES = 16384
NOTHING = -1
FIELDS: Mapping[str, Callable[[SamplingParams], float]] = {
    **{key: attrgetter(key) for key in SAMPLERS},
    "inverse_temperature": lambda p: 0.0 if p.temperature < GREEDY_BELOW else 1.0 / p.temperature,
    # How far below the best a candidate can still win. Rare samplers may drop the best.
    "reach": lambda p: math.inf if p.typical_p < 1 or p.rare else REACH * p.temperature,
    "drop": lambda p: min(0.0, math.log(p.min_p)) if p.min_p > 0 else -math.inf,
}
"""Columns of `SamplingTensors.floats`: every number of the sampling, and numbers that are derived from them."""


def column(name: str) -> tl.constexpr:
    """Return the column of a field, for kernels."""
    return tl.constexpr(list(FIELDS).index(name))


COLUMNS = tl.constexpr(len(FIELDS))
INVERSE_TEMPERATURE = column("inverse_temperature")
REACH_COLUMN = column("reach")
TYPICAL_P = column("typical_p")
TOP_P = column("top_p")
DROP = column("drop")
REPETITION = column("repetition_penalty")
FREQUENCY = column("frequency_penalty")
PRESENCE = column("presence_penalty")
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


class SamplingTensors(NamedTuple):
    """Sampling settings of each slot."""

    floats: torch.Tensor
    """fp32 [S, columns], columns FIELDS."""
    top_k: torch.Tensor
    """int32 [S]; 0: off."""
    keys: torch.Tensor
    """int64 [S]: `gumbel.draw_key` before its last step, mix(mix(seed + G) ^ choice + G)."""
    bias_counts: torch.Tensor
    """int32 [S]."""
    prompt_tokens: torch.Tensor
    """int32 [S]: how many of a slot's tokens are prompt."""
    bias_ids: torch.Tensor
    """int32 [S, width]."""
    bias_values: torch.Tensor
    """fp32 [S, width]."""
    words: torch.Tensor
    """int32: the memory of all of these but the biases, one behind the other, so that one kernel writes the
    settings of new sequences."""

    @staticmethod
    def empty(slots: int, bias: int, device: torch.device) -> "SamplingTensors":
        words = torch.zeros(_padded(slots) * sum(_WORDS), dtype=torch.int32, device=device)
        floats, keys, *integers = words.split([_padded(slots) * width for width in _WORDS])
        return SamplingTensors(
            floats=floats.view(torch.float32).view(-1, len(FIELDS))[:slots],
            keys=keys.view(torch.int64)[:slots],
            top_k=integers[0][:slots],
            bias_counts=integers[1][:slots],
            prompt_tokens=integers[2][:slots],
            bias_ids=torch.zeros(slots, bias, dtype=torch.int32, device=device),
            bias_values=torch.zeros(slots, bias, device=device),
            words=words,
        )

    def packed(
        self,
        slots: Sequence[int],
        *,
        floats: NDArray[np.float32],
        keys: Sequence[int],
        top_k: Sequence[int],
        bias_counts: Sequence[int],
        prompt_tokens: Sequence[int],
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Settings of slots as entries of `words`: their places and values. Arguments as the tensors, a row a
        slot."""
        rows = np.array(slots, np.int64)[:, None]
        begin = 0
        places = []
        for width in _WORDS:
            places.append(begin + rows * width + np.arange(width))
            begin += _padded(self.top_k.shape[0]) * width
        values = [
            floats.view(np.int32),
            np.array(keys, np.int64).view(np.int32).reshape(-1, 2),
            np.stack([top_k, bias_counts, prompt_tokens], 1).astype(np.int32),
        ]
        return np.concatenate(places, 1).reshape(-1), np.concatenate(values, 1).reshape(-1)


@triton.jit
def setting(settings, slot, column: tl.constexpr):
    """Load a column of FIELDS of a slot."""
    return tl.load(settings.floats + slot * COLUMNS + column)


class Draws(NamedTuple):
    """Row of logits, slot, and position of the drawn token in its sequence, of each draw; int32 [P]."""

    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor


class Masking(NamedTuple):
    """Masks int32 [N, words], and the mask of each draw, int32 [P]. -1: no mask."""

    masks: torch.Tensor
    rows: torch.Tensor


_WORDS = (len(FIELDS), 2, 1, 1, 1)
"""Words of a slot in each part of `SamplingTensors.words`."""


def _padded(slots: int) -> int:
    """Round slots up so that each part of `words` starts at 16 bytes.

    Triton compiles kernels for this alignment.
    """
    return slots + -slots % 4


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


class Scratch(NamedTuple):
    """Workspace for P draws."""

    z: torch.Tensor
    blocks: torch.Tensor
    candidates: torch.Tensor
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

    def part(self, draws: int) -> "Scratch":
        """Return the workspace of fewer draws."""
        return Scratch(*(tensor[:draws] for tensor in self))


def check(logits: torch.Tensor, draws: Draws, settings: SamplingTensors, scratch: Scratch) -> None:
    """Raise ValueError with the name of an argument that the kernels cannot read."""
    vocabulary = logits.shape[1]
    device = logits.device
    count = draws.rows.shape[0]
    slot_count = settings.top_k.shape[0]
    require("logits", logits, (None, vocabulary), device)
    for name, tensor in draws._asdict().items():
        require(name, tensor, (count,), device, torch.int32)
    require("settings.floats", settings.floats, (slot_count, len(FIELDS)), device, torch.float32)
    require("settings.top_k", settings.top_k, (slot_count,), device, torch.int32)
    require("settings.keys", settings.keys, (slot_count,), device, torch.int64)
    require("settings.bias_ids", settings.bias_ids, (slot_count, None), device, torch.int32)
    require("scratch.z", scratch.z, (count, vocabulary), device, torch.float32)
    require(
        "scratch.blocks",
        scratch.blocks,
        (count, BLOCK_ROWS.value, -(-vocabulary // BLOCK)),
        device,
        torch.float32,
    )
    require("scratch.candidates", scratch.candidates, (count, CANDIDATES), device, torch.float32)
