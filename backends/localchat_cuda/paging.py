"""The KV pages of a model, and what a step says about its tokens.

Letters: T tokens of the step, S sequences, L layers, J key/value heads, D head dimension. A *page* holds
`page_tokens` positions of one sequence in one layer; a *table* lists the pages of a slot in order. Page
numbers are the same in all layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from localchat_cuda.config import ModelConfig
from localchat_cuda.kernels import attention_many, rope
from localchat_cuda.kernels.attention import Batch
from localchat_cuda.kernels.attention_few import WIDEST
from localchat_cuda.plan import PAGE_TOKENS


class Pages:
    """The cache: one tensor [L, pages, 2, J, page_tokens, D], keys beside values of a page."""

    def __init__(
        self, config: ModelConfig, pages: int, context_tokens: int, device: torch.device,
        dtype: torch.dtype, page_tokens: int = PAGE_TOKENS,
    ) -> None:  # fmt: skip
        """`context_tokens`: the longest sequence, for the table of rotations."""
        self.page_tokens, self.device, self.dtype = page_tokens, device, dtype
        self.pool = torch.zeros(
            config.layers, pages, 2, config.key_heads, page_tokens, config.head_dim,
            device=device, dtype=dtype,
        )  # fmt: skip
        scaling = None
        if config.scaling is not None:
            held = config.scaling
            scaling = rope.Llama3Scaling(
                held.factor,
                held.low_frequency_factor,
                held.high_frequency_factor,
                held.original_context,
            )
        self.angles = rope.angles(context_tokens, config.head_dim, config.theta, device, scaling)

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [pages, J, page_tokens, D] of a layer: views."""
        pool = self.pool[number]
        return pool[:, 0], pool[:, 1]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` positions of a page, in all layers."""
        self.pool[:, target, :, :, :tokens] = self.pool[:, source, :, :, :tokens]


class Stretch(NamedTuple):
    """Tokens of one sequence in a step: they stand at `start` and on in slot `slot`. wanted: the logits of
    the last so many of them."""

    slot: int
    start: int
    tokens: tuple[int, ...]
    wanted: int = 1


@dataclass(frozen=True, slots=True)
class Few:
    """Sequences with at most 16 new tokens; they stand first. tokens: theirs in all. widest: of one
    sequence. longest: tokens in the cache of the longest."""

    batch: Batch
    tokens: int
    widest: int
    longest: int


@dataclass(frozen=True, slots=True)
class Many:
    """Sequences with more new tokens. tiles: attention_many.tiles_of."""

    batch: Batch
    tiles: torch.Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """A step on the device, int32: ids, positions and slots [T]; tables [slots, width]; wanted [P] int64.
    batch: all sequences, of which few and many are the two kinds (None: none of that kind)."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    wanted: torch.Tensor
    batch: Batch
    few: Few | None
    many: Many | None


def order_of(stretches: Sequence[Stretch]) -> list[int]:
    """Numbers of the stretches in the order of their rows: those with few tokens first."""
    return sorted(range(len(stretches)), key=lambda i: len(stretches[i].tokens) > WIDEST)


def inputs_of(stretches: Sequence[Stretch], tables: torch.Tensor, head_dim: int) -> Inputs:
    """Lay out a step on the device of `tables`. Rows of logits come in the order of `order_of`, and of
    their tokens. Every stretch has at least one token, and its pages stand in its slot's table."""
    device = tables.device
    ordered = [stretches[i] for i in order_of(stretches)]
    counts = [len(each.tokens) for each in ordered]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    lengths = [each.start + len(each.tokens) for each in ordered]
    wanted = [
        begin + count - back
        for each, begin, count in zip(ordered, starts, counts, strict=True)
        for back in range(each.wanted, 0, -1)
    ]

    def whole(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def batch(low: int, high: int) -> Batch:
        slots = [each.slot for each in ordered[low:high]]
        return Batch(
            whole(starts[low:high]), whole(counts[low:high]), whole(lengths[low:high]), whole(slots),
            tables,
        )  # fmt: skip

    border = sum(count <= WIDEST for count in counts)
    few = many = None
    if border:
        few = Few(
            batch(0, border), sum(counts[:border]), max(counts[:border]), max(lengths[:border])
        )
    if border < len(ordered):
        rows = attention_many.cut_for(head_dim).rows
        tiles = attention_many.tiles_of(counts[border:], lengths[border:], rows)
        many = Many(
            batch(border, len(ordered)), torch.tensor(tiles, dtype=torch.int32, device=device)
        )
    return Inputs(
        ids=whole([token for each in ordered for token in each.tokens]),
        positions=whole([each.start + i for each in ordered for i in range(len(each.tokens))]),
        slots=whole([each.slot for each in ordered for _ in each.tokens]),
        tables=tables,
        wanted=torch.tensor(wanted, dtype=torch.int64, device=device),
        batch=batch(0, len(ordered)),
        few=few,
        many=many,
    )
