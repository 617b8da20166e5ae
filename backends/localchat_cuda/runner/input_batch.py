"""Lays a step out on the host: the row and the position of every token.

Letters: T tokens of the step (padding included), S sequences. Sequences with at most MAX_DECODE_WIDTH new
tokens come first (decoding, and drafts being verified), then prompt chunks. Row counts are padded to those
at which gemms are fast, and at which a CUDA graph can be captured once and used often.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from localchat_cuda.config.model import PAGE_TOKENS
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import decode_fused
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention.decode import WIDEST
from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.kernels.delta_net import CHUNK, Tokens
from localchat_cuda.plan.memory_plan import (
    LARGEST_CAPTURED,
    LARGEST_DECODE,
    dequant_pages,
)
from localchat_cuda.runner.kv_pages import DecodeBatch, ModelInputs, PrefillBatch
from localchat_cuda.runner.step_buffer import ALIGNED_WORDS, BufferSlice, StepBuffer

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, LARGEST_DECODE)
"""Row counts of steps that only decode or verify. 33 rows take longer than 64 on an H200."""
PREFILL_BUCKETS = (
    64,
    128,
    192,
    256,
    384,
    512,
    640,
    768,
    1024,
    *range(1280, LARGEST_CAPTURED + 1, 256),
)
"""Row counts of steps with prompt chunks, up to the largest that is captured."""
MIXED_BUCKETS = (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096)
"""The same with decoding sequences in the step: fewer, since a shape's first steps are launched kernel by
kernel, 35 ms of the host each, and such steps come in as many shapes as there are numbers of sequences."""
MIXED_DECODE_BUCKETS = (0, 8, 32, 64, 128, 256)
"""Rows of decoding sequences in a step with prompt chunks: coarse, since every combination is a graph."""
MAX_DECODE_WIDTH = 2 * WIDEST
"""Sequences with more new tokens are prompt chunks."""
TOKEN_MULTIPLE = 16
"""Longer steps are padded to multiples of this: the gemms need it."""
_USUAL_DEQUANT_PAGES = 64
"""FP8 pages that most steps dequantize at most; a graph starts programs for its whole capacity."""


class TokenSpan(NamedTuple):
    """New tokens of one sequence: `width` of them from position `start` on, in slot `slot`."""

    slot: int
    start: int
    width: int


class StepShape(NamedTuple):
    """All numbers of a step that a CUDA graph has as constants."""

    tokens: int
    """Of the step."""
    decode_tokens: int
    """Of the decode part, which comes first."""
    decode_sequences: int
    widest: int
    """Most new tokens of one sequence of the decode part."""
    splits: int
    """Ranges that a history is cut into."""
    prefill_sequences: int
    tiles: int
    """Of prompt chunks."""
    dequant_pages: int = 0
    """Capacity for FP8 pages that are dequantized for the prompt chunks."""
    one_page: bool = False
    """No range of a history is longer than a page, and few sequences decode: decode_fused serves the step."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Properties of the model and the device that decide a step's layout."""

    heads: int
    key_heads: int
    head_dim: int
    page_tokens: int
    sms: int
    """Multiprocessors of the GPU."""
    fp8_kv: bool = False
    """The cache holds 8-bit codes."""
    context_tokens: int = PAGE_TOKENS
    """Most tokens of a sequence, padding among them."""
    latents: bool = False
    """The cache holds latents."""
    states: bool = False
    """The model has delta nets, which read the place of each token in its sequence."""
    prefill_tile: prefill_attention.PrefillTileConfig | None = None
    """Tile config of the fastest kernel for prompt chunks over fp16 pages; None: the one for every device."""

    def tile_config(self, pages: int) -> prefill_attention.PrefillTileConfig:
        """With capacity for `pages` dequantized pages. Only the kernel for every device reads codes."""
        reads_numbers = pages or not self.fp8_kv
        return (reads_numbers and self.prefill_tile) or prefill_attention.tile_config_for(
            self.head_dim
        )


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The layout of one step."""

    spans: tuple[TokenSpan, ...]
    """Decode part, then prompt chunks, padding in both; a span without tokens is idle."""
    first: tuple[int, ...]
    """By row of the plan, the number of its first token."""
    shape: StepShape
    tiles: tuple[tuple[int, int], ...]
    tile_config: prefill_attention.PrefillTileConfig
    dequantized: tuple[tuple[int, int], ...]
    """FP8 pages to dequantize for the prompt chunks, each (slot, index in its block table)."""
    captured: bool
    """A CUDA graph may serve this step."""
    chunks: tuple[tuple[int, int], ...] | None = None
    """Chunks of the prompt chunks' tokens, as ChunkedPart has them; None: the model has no states."""

    @property
    def all_logits(self) -> bool:
        """True if the logits of all tokens are computed: a small step without prompt chunks."""
        return self.captured and not self.tiles


def build_input_batch(spans: Sequence[TokenSpan], config: BatchConfig, scratch: int) -> InputBatch:
    """Order and pad a step; every span has at least one token. Padding is text of the slot `scratch`: rows
    that no sequence owns would otherwise read memory that was never written."""
    # A state goes through the parts of a split span one after the other, so none is split.
    most = WIDEST if config.states else MAX_DECODE_WIDTH
    decode_rows = [i for i, each in enumerate(spans) if each.width <= most]
    prefill_rows = [i for i, each in enumerate(spans) if each.width > most]
    decode_used = sum(spans[i].width for i in decode_rows)
    prefill_used = sum(spans[i].width for i in prefill_rows)
    decode_tokens, tokens, captured = _padded(decode_used, prefill_used)
    first = [0] * len(spans)
    for rows, at in ((decode_rows, 0), (prefill_rows, decode_tokens)):
        for i in rows:
            first[i] = at
            at += spans[i].width
    decode = [part for i in decode_rows for part in _split_drafts(spans[i])]
    widest = WIDEST if any(each.width > 1 for each in decode) else 1
    decode += _padding(decode_tokens - decode_used, widest, scratch)
    prefill = [spans[i] for i in prefill_rows]
    # No longer than the block table of `scratch`: the entries after it belong to other slots.
    prefill += _padding(tokens - decode_tokens - prefill_used, config.context_tokens, scratch)
    pages = _page_capacity(prefill, config)
    dequantized = _pages(prefill, config.page_tokens) if pages else []
    tile_config = config.tile_config(pages)
    tiles = _tiles(prefill, tile_config.rows)
    if captured and decode:
        decode += _idle(_power_of_two(len(decode)) - len(decode), scratch) if widest > 1 else []
    if prefill:
        # The arrays of the prompt chunks follow those of the decode part and must be aligned, too.
        decode += _idle(-len(decode) % ALIGNED_WORDS, scratch)
    if captured and prefill:
        # One idle sequence at least: tiles without work belong to it.
        prefill += _idle(_power_of_eight(len(prefill) + 1) - len(prefill), scratch)
        most = -(-(tokens - decode_tokens) // tile_config.rows) + len(prefill)
        tiles += [(len(prefill) - 1, 0)] * (most - len(tiles))
    splits = _splits(decode, widest, config, coarse=bool(prefill))
    few = widest == 1 and len(decode) <= decode_fused.MOST_SEQUENCES and not prefill
    one_page = few and splits * config.page_tokens >= max(each.start + 1 for each in decode)
    shape = StepShape(
        tokens,
        decode_tokens,
        len(decode),
        widest,
        splits,
        len(prefill),
        len(tiles),
        pages,
        one_page,
    )
    chunks = None
    if config.states:
        chunks = _chunks(prefill, tokens - decode_tokens if captured else 0)
    return InputBatch(
        (*decode, *prefill),
        tuple(first),
        shape,
        tuple(tiles),
        tile_config,
        tuple(dequantized),
        captured,
        chunks,
    )


def _padded(decode: int, prefill: int) -> tuple[int, int, bool]:
    """(tokens of the decode part, tokens of the step, whether graphs are captured for these)."""
    total = decode + prefill
    if not prefill and total <= DECODE_BUCKETS[-1]:
        tokens = next(bucket for bucket in DECODE_BUCKETS if total <= bucket)
        return tokens, tokens, True
    if prefill and decode <= DECODE_BUCKETS[-1]:
        decode_tokens = next(bucket for bucket in MIXED_DECODE_BUCKETS if decode <= bucket)
        needed = decode_tokens + prefill
        buckets = MIXED_BUCKETS if decode_tokens else PREFILL_BUCKETS
        tokens = next((bucket for bucket in buckets if needed <= bucket), 0)
        if tokens:
            return decode_tokens, tokens, True
    tokens = -(-total // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    return decode if prefill else tokens, tokens, False


def _padding(missing: int, most: int, scratch: int) -> list[TokenSpan]:
    return [TokenSpan(scratch, 0, min(most, missing - at)) for at in range(0, missing, most)]


def _idle(missing: int, scratch: int) -> list[TokenSpan]:
    return [TokenSpan(scratch, 0, 0)] * missing


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _power_of_eight(least: int) -> int:
    return 1 << -(-(least - 1).bit_length() // 3) * 3


def _page_capacity(prefill: Sequence[TokenSpan], config: BatchConfig) -> int:
    """FP8 pages that a step can dequantize; 0 if its chunks read codes, because no faster kernel takes the
    numbers or the histories are too long."""
    hopper = config.prefill_tile == prefill_attention.HOPPER
    if not (prefill and config.fp8_kv and hopper):
        return 0
    needed = len(_pages(prefill, config.page_tokens))
    most = dequant_pages(config.key_heads, config.head_dim)
    return next((pages for pages in (_USUAL_DEQUANT_PAGES, most) if needed <= pages <= most), 0)


def _pages(prefill: Sequence[TokenSpan], page_tokens: int) -> list[tuple[int, int]]:
    """(slot, index in its block table) of every page that the chunks see, once."""
    ends = {each.slot: each.start + each.width for each in prefill}
    return [(slot, n) for slot, end in ends.items() for n in range(-(-end // page_tokens))]


def _tiles(prefill: Sequence[TokenSpan], rows: int) -> list[tuple[int, int]]:
    counts = [each.width for each in prefill]
    ends = [each.start + each.width for each in prefill]
    return prefill_attention.tiles_of(counts, ends, rows)


def _chunks(prefill: Sequence[TokenSpan], captured_tokens: int) -> tuple[tuple[int, int], ...]:
    """(sequence, chunk in it) of every chunk; for a graph as many as its shape can have, the rest (-1, 0)."""
    chunks = [
        (number, at) for number, each in enumerate(prefill) for at in range(-(-each.width // CHUNK))
    ]
    if captured_tokens:
        most = -(-captured_tokens // CHUNK) + len(prefill)
        chunks += [(-1, 0)] * (most - len(chunks))
    return tuple(chunks)


def _splits(decode: Sequence[TokenSpan], widest: int, config: BatchConfig, *, coarse: bool) -> int:
    """Ranges of a history: a power of two, so that graphs are few. `coarse`: a power of four, for steps with
    prompt chunks, which take longer than the decode part."""
    if not decode:
        return 0
    longest = max(each.start + each.width for each in decode)
    rows = 64
    most = decode_attention.MOST_SPLITS
    resident = decode_attention.programs_for(config.fp8_kv, len(decode), widest)
    if config.latents:
        rows = decode_attention.LATENT_ROWS
        most = decode_attention.MOST_LATENT_SPLITS
        resident = 1
    elif longest >= decode_attention.LONG_TOKENS:
        most = decode_attention.MOST_LONG_SPLITS
    blocks = -(-config.heads // config.key_heads * widest // rows)
    splits = decode_attention.splits_for(
        len(decode),
        config.key_heads,
        blocks,
        longest,
        config.page_tokens,
        config.sms * resident,
        most,
    )
    if coarse:
        return 1 << (splits.bit_length() - 1) // 2 * 2
    if splits < -(-longest // config.page_tokens):
        return 1 << splits.bit_length() - 1
    # A page each. One range of two takes as long as if all had two: 8 ranges of 300 tokens take 3.5 us a layer,
    # 4 take 6.0 (H200).
    return 1 << (splits - 1).bit_length()


def _split_drafts(span: TokenSpan) -> list[TokenSpan]:
    """A span in parts that the decode kernel takes: a long draft becomes two neighbours in the same slot,
    which is right because all keys of a layer are written before any are read."""
    slot, start, count = span
    if count > MAX_DECODE_WIDTH:
        return [span]
    return [TokenSpan(slot, start + at, min(WIDEST, count - at)) for at in range(0, count, WIDEST)]


class BatchSlices(NamedTuple):
    """Arrays of an InputBatch in the step buffer, in this order: at the same place in all steps of a shape."""

    ids: BufferSlice
    """Indices into the token table, int64 [T]."""
    positions: BufferSlice
    slots: BufferSlice
    starts: BufferSlice
    """By sequence [S], its first row, as are the three arrays that follow."""
    counts: BufferSlice
    lengths: BufferSlice
    sequence_slots: BufferSlice
    tiles: BufferSlice
    dequantized: BufferSlice
    offsets: BufferSlice | None = None
    """Of tokens from the first one of their sequence [T], and the chunks; None: the model has no states."""
    chunks: BufferSlice | None = None


def write_batch(
    batch: InputBatch, buffer: StepBuffer, columns: int, scratch: int, padding_index: int
) -> BatchSlices:
    """Write a layout into an empty buffer. `columns`: of the token table. `scratch`: the slot of padding.
    `padding_index`: the entry of the token table that padding reads."""
    spans = batch.spans
    widths = np.array([each.width for each in spans], np.int64)
    first = np.cumsum(widths) - widths
    starts = np.array([each.start for each in spans], np.int64)
    positions = np.arange(batch.shape.tokens) + np.repeat(starts - first, widths)
    slots = np.repeat(np.array([each.slot for each in spans], np.int64), widths)
    ids = np.where(slots == scratch, padding_index, slots * columns + positions)
    lengths = [max(1, each.start + each.width) for each in spans]
    unused = [-1] * (2 * (batch.shape.dequant_pages - len(batch.dequantized)))
    found = BatchSlices(
        ids=buffer.write(ids, int64=True),
        positions=buffer.write(positions),
        slots=buffer.write(slots),
        starts=buffer.write(first),
        counts=buffer.write(widths),
        lengths=buffer.write(lengths),
        sequence_slots=buffer.write([each.slot for each in spans]),
        tiles=buffer.write([number for tile in batch.tiles for number in tile]),
        dequantized=buffer.write(
            [number for page in batch.dequantized for number in page] + unused
        ),
    )
    if batch.chunks is None:
        return found
    offsets = np.arange(batch.shape.tokens) - np.repeat(first, widths)
    chunks = [number for chunk in batch.chunks for number in chunk]
    return found._replace(offsets=buffer.write(offsets), chunks=buffer.write(chunks))


def model_inputs(
    batch: InputBatch,
    slices: BatchSlices,
    token_table: torch.Tensor,
    block_tables: torch.Tensor,
    logits_indices: torch.Tensor | None,
    window_tables: torch.Tensor | None = None,
) -> ModelInputs:
    """The step on the device. Reads its token ids from the flat `token_table`. `window_tables`: of windowed
    layers with pages of their own, if there are any."""
    starts = slices.starts.view()
    counts = slices.counts.view()
    lengths = slices.lengths.view()
    slots = slices.sequence_slots.view()

    def part(sequences: slice) -> AttentionBatch:
        return AttentionBatch(
            starts[sequences], counts[sequences], lengths[sequences], slots[sequences], block_tables
        )

    decode = prefill = tokens = None
    if slices.offsets is not None:
        tokens = Tokens(slices.slots.view(), slices.positions.view(), slices.offsets.view())
    shape = batch.shape
    border = shape.decode_sequences
    if border:
        decode = DecodeBatch(
            part(slice(0, border)), shape.decode_tokens, shape.widest, shape.splits, shape.one_page
        )
    if shape.tiles:
        tiles = slices.tiles.view().view(-1, 2)
        dequantized = slices.dequantized.view().view(-1, 2) if shape.dequant_pages else None
        chunks = slices.chunks.view().view(-1, 2) if slices.chunks is not None else None
        prefill = PrefillBatch(
            part(slice(border, None)), tiles, batch.tile_config, dequantized, chunks
        )
    return ModelInputs(
        ids=torch.index_select(token_table, 0, slices.ids.view()),
        positions=slices.positions.view(),
        slots=slices.slots.view(),
        block_tables=block_tables,
        window_tables=block_tables if window_tables is None else window_tables,
        logits_indices=logits_indices,
        tokens=tokens,
        batch=part(slice(None)),
        decode=decode,
        prefill=prefill,
    )
