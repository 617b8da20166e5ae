"""A step laid out on the host: which token stands in which row of the computation, at what position.

Letters: T tokens of the step (padding included), S sequences. Rows with at most 16 new tokens come first:
decoding, and drafts being verified; prompt chunks follow. Row counts are padded to those at which the
products are fast and at which a graph can be captured once and used often.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention.decode import WIDEST
from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.memory_plan import PAGE_TOKENS, dequant_pages
from localchat_cuda.runner.kv_pages import DecodeBatch, ModelInputs, PrefillBatch
from localchat_cuda.runner.step_buffer import ALIGNED, BufferSlice, StepBuffer

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Row counts of steps that only decode or verify. 33 rows take longer than 64 on an H200."""
PREFILL_BUCKETS = (64, 128, 192, 256, 384, 512, 640, 768, 1024, *range(1280, 4097, 256))
"""Row counts of steps with prompt chunks, as long as they are captured at all."""
MIXED_BUCKETS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""The same where others write meanwhile: fewer, since a shape's first steps are launched kernel by kernel, 35
ms of the host each, and such steps come in as many shapes as there are numbers of writers."""
MIXED_DECODE_BUCKETS = (0, 8, 32, 128, 256)
"""Rows of decoding sequences beside prompt chunks: coarse, since every combination is a graph."""
MAX_DECODE_WIDTH = 2 * WIDEST
TOKEN_MULTIPLE = 16
"""Longer steps are padded to multiples of this: the products want it."""
_SMALL_ROOM = 64
"""Pages that most steps need to decode; a graph starts programs for all that there is room for."""


class TokenSpan(NamedTuple):
    """New tokens of one sequence: `width` of them at `start` and on in slot `slot`."""

    slot: int
    start: int
    width: int


class StepShape(NamedTuple):
    """What a graph is captured for. tokens: of the step. few_tokens, few_sequences: of rows with few tokens,
    which stand first; widest: most new tokens of one of them; splits: ranges that a history is cut into.
    many_sequences, tiles: of prompt chunks; decoded: room for pages that are decoded for them."""

    tokens: int
    decode_tokens: int
    decode_sequences: int
    widest: int
    splits: int
    prefill_sequences: int
    tiles: int
    decoded: int = 0


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """What the layout needs to know of the model and the device."""

    heads: int
    key_heads: int
    head_dim: int
    page_tokens: int
    sms: int
    coded: bool = False
    """Whether the cache holds codes of 8 bits."""
    context_tokens: int = PAGE_TOKENS
    """Most tokens of a sequence, padding among them."""
    chunks: prefill_attention.PrefillTileConfig | None = None
    """What prompt chunks over plain pages are attended to with; None: what there is for every device."""

    def cut(self, room: int) -> prefill_attention.PrefillTileConfig:
        """With `room` for decoded pages. Codes themselves are read by the kernel for every device."""
        plain = room or not self.coded
        return (plain and self.chunks) or prefill_attention.cut_for(self.head_dim)


@dataclass(frozen=True, slots=True)
class InputBatch:
    """A step. stretches: those with few tokens, then prompt chunks, padding among both; one without tokens is
    idle. first: per row of the plan, the number of its first token. cut: of the tiles. decoded: pages of codes
    that are made plain for them, each (slot, place in its table). captured: whether a graph may serve it."""

    spans: tuple[TokenSpan, ...]
    first: tuple[int, ...]
    shape: StepShape
    tiles: tuple[tuple[int, int], ...]
    cut: prefill_attention.PrefillTileConfig
    decoded: tuple[tuple[int, int], ...]
    captured: bool

    @property
    def every(self) -> bool:
        """Whether the logits of all tokens are computed: there is no prompt chunk, and the step is small."""
        return self.captured and not self.tiles


def build_input_batch(
    spans: Sequence[TokenSpan], pad_to: int, sizes: BatchConfig, scratch: int
) -> InputBatch:
    """The order and the padding of a step; every stretch has at least one token. Padding is text of the slot
    `scratch`: rows that nobody computes would bring numbers that nobody wrote."""
    few_rows = [i for i, each in enumerate(spans) if each.width <= MAX_DECODE_WIDTH]
    many_rows = [i for i, each in enumerate(spans) if each.width > MAX_DECODE_WIDTH]
    few_real = sum(spans[i].width for i in few_rows)
    many_real = sum(spans[i].width for i in many_rows)
    decode_tokens, tokens, captured = _padded(few_real, many_real, pad_to)
    first = [0] * len(spans)
    for numbers, at in ((few_rows, 0), (many_rows, decode_tokens)):
        for i in numbers:
            first[i] = at
            at += spans[i].width
    few = [piece for i in few_rows for piece in _pieces(spans[i])]
    widest = WIDEST if any(each.width > 1 for each in few) else 1
    few += _padding(decode_tokens - few_real, widest, scratch)
    many = [spans[i] for i in many_rows]
    # No longer than its block table: what lies behind that belongs to others.
    many += _padding(tokens - decode_tokens - many_real, sizes.context_tokens, scratch)
    room = _room(many, sizes)
    decoded = _pages(many, sizes.page_tokens) if room else []
    cut = sizes.cut(room)
    tiles = _tiles(many, cut.rows)
    if captured and few:
        few += _idle(_power_of_two(len(few)) - len(few), scratch) if widest > 1 else []
    if many:
        # What is said of the chunks stands behind: it must begin where an array may.
        few += _idle(-len(few) % ALIGNED, scratch)
    if captured and many:
        # One idle sequence at least: tiles without work belong to it.
        many += _idle(_power_of_eight(len(many) + 1) - len(many), scratch)
        most = -(-(tokens - decode_tokens) // cut.rows) + len(many)
        tiles += [(len(many) - 1, 0)] * (most - len(tiles))
    splits = _splits(few, widest, sizes, coarse=bool(many))
    counts = len(few), widest, splits, len(many), len(tiles), room
    shape = StepShape(tokens, decode_tokens, *counts)
    return InputBatch(
        (*few, *many), tuple(first), shape, tuple(tiles), cut, tuple(decoded), captured
    )


def _padded(few: int, many: int, pad_to: int) -> tuple[int, int, bool]:
    """(tokens of the few, tokens of the step, whether graphs are captured for these)."""
    total = max(few + many, pad_to)
    if not many and total <= DECODE_BUCKETS[-1]:
        tokens = next(bucket for bucket in DECODE_BUCKETS if total <= bucket)
        return tokens, tokens, True
    if many and few <= DECODE_BUCKETS[-1]:
        own = next(bucket for bucket in MIXED_DECODE_BUCKETS if few <= bucket)
        wanted = max(own + many, pad_to)
        buckets = MIXED_BUCKETS if own else PREFILL_BUCKETS
        tokens = next((bucket for bucket in buckets if wanted <= bucket), 0)
        if tokens:
            return own, tokens, True
    tokens = -(-total // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    return few if many else tokens, tokens, False


def _padding(missing: int, most: int, scratch: int) -> list[TokenSpan]:
    return [TokenSpan(scratch, 0, min(most, missing - at)) for at in range(0, missing, most)]


def _idle(missing: int, scratch: int) -> list[TokenSpan]:
    return [TokenSpan(scratch, 0, 0)] * missing


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _power_of_eight(least: int) -> int:
    return 1 << -(-(least - 1).bit_length() // 3) * 3


def _room(many: Sequence[TokenSpan], sizes: BatchConfig) -> int:
    """Pages that a step has room for to decode, 0 where its chunks read codes: where no faster kernel wants
    plain pages, or the histories are too long."""
    if not (many and sizes.coded and sizes.chunks == prefill_attention.HOPPER):
        return 0
    wanted = len(_pages(many, sizes.page_tokens))
    most = dequant_pages(sizes.key_heads, sizes.head_dim)
    return next((room for room in (_SMALL_ROOM, most) if wanted <= room <= most), 0)


def _pages(many: Sequence[TokenSpan], page_tokens: int) -> list[tuple[int, int]]:
    """(slot, place in its table) of every page that the chunks see, once."""
    ends = {each.slot: each.start + each.width for each in many}
    return [(slot, n) for slot, end in ends.items() for n in range(-(-end // page_tokens))]


def _tiles(many: Sequence[TokenSpan], rows: int) -> list[tuple[int, int]]:
    counts = [each.width for each in many]
    ends = [each.start + each.width for each in many]
    return prefill_attention.tiles_of(counts, ends, rows)


def _splits(few: Sequence[TokenSpan], widest: int, sizes: BatchConfig, *, coarse: bool) -> int:
    """A power of two, so that graphs are few; of four where `coarse`: beside prompt chunks, the longer part."""
    if not few:
        return 0
    blocks = -(-sizes.heads // sizes.key_heads * widest // 64)
    longest = max(each.start + each.width for each in few)
    splits = decode_attention.splits_for(
        len(few), sizes.key_heads, blocks, longest, sizes.page_tokens,
        sizes.sms * decode_attention.programs_for(sizes.coded),
    )  # fmt: skip
    step = 2 if coarse else 1
    return 1 << (splits.bit_length() - 1) // step * step


def _pieces(whole: TokenSpan) -> list[TokenSpan]:
    """A stretch as the kernels take it: a long draft is two neighbours in the same slot, since all keys of a
    layer are written before any are read."""
    slot, start, count = whole
    if count > MAX_DECODE_WIDTH:
        return [whole]
    return [TokenSpan(slot, start + at, min(WIDEST, count - at)) for at in range(0, count, WIDEST)]


class Places(NamedTuple):
    """Where the arrays of a layout lie in the inbox, in this order: the same for every step of a shape."""

    ids: BufferSlice
    positions: BufferSlice
    slots: BufferSlice
    starts: BufferSlice
    counts: BufferSlice
    lengths: BufferSlice
    owners: BufferSlice
    tiles: BufferSlice
    decoded: BufferSlice


def put(layout: InputBatch, buffer: StepBuffer, columns: int, scratch: int, nothing: int) -> Places:
    """Write a layout into an empty inbox. columns: of the table of known tokens. scratch: the slot of
    padding. nothing: the place in that table that padding reads its token from."""
    widths = np.array([each.width for each in layout.spans], np.int64)
    begins = np.cumsum(widths) - widths
    own = np.array([each.start for each in layout.spans], np.int64)
    positions = np.arange(layout.shape.tokens) + np.repeat(own - begins, widths)
    slots = np.repeat(np.array([each.slot for each in layout.spans], np.int64), widths)
    ids = np.where(slots == scratch, nothing, slots * columns + positions)
    lengths = [max(1, each.start + each.width) for each in layout.spans]
    unused = [-1] * (2 * (layout.shape.decoded - len(layout.decoded)))
    return Places(
        buffer.put(ids, wide=True),
        buffer.put(positions),
        buffer.put(slots),
        buffer.put(begins),
        buffer.put(widths),
        buffer.put(lengths),
        buffer.put([each.slot for each in layout.spans]),
        buffer.put([number for tile in layout.tiles for number in tile]),
        buffer.put([number for page in layout.decoded for number in page] + unused),
    )


def model_inputs(
    layout: InputBatch, places: Places, buffer: StepBuffer, known: torch.Tensor, tables: torch.Tensor,
    wanted: torch.Tensor | None,
) -> ModelInputs:  # fmt: skip
    """The step on the device. Reads its token ids from `known` (flat) at the places in the inbox."""
    view = buffer.view
    starts, counts = view(places.starts), view(places.counts)
    lengths, owners = view(places.lengths), view(places.owners)

    def batch(part: slice) -> AttentionBatch:
        return AttentionBatch(starts[part], counts[part], lengths[part], owners[part], tables)

    few = many = None
    shape = layout.shape
    border = shape.decode_sequences
    if border:
        few = DecodeBatch(batch(slice(0, border)), shape.decode_tokens, shape.widest, shape.splits)
    if shape.tiles:
        tiles = view(places.tiles).view(-1, 2)
        decoded = view(places.decoded).view(-1, 2) if shape.decoded else None
        many = PrefillBatch(batch(slice(border, None)), tiles, layout.cut, decoded)
    return ModelInputs(
        ids=torch.index_select(known, 0, view(places.ids)),
        positions=view(places.positions),
        slots=view(places.slots),
        tables=tables,
        wanted=wanted,
        batch=batch(slice(None)),
        few=few,
        many=many,
    )
