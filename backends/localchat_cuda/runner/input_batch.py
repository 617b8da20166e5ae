"""Computes the layout of a step on the host: the row and the position of every token.

Letters: T tokens of the step (including padding), S sequences. Sequences with at most MAX_DECODE_WIDTH new
tokens come first (decoding and verification of drafts), then prompt chunks. Row counts are padded to counts at
which gemms are fast, and for which one CUDA graph serves many steps.
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
from localchat_cuda.kernels.launch import power_of_two
from localchat_cuda.plan.memory_plan import LARGEST_CAPTURED, LARGEST_DECODE, dequant_pages
from localchat_cuda.runner.device_state import StateTable
from localchat_cuda.runner.step_buffer import ALIGNED_WORDS, BufferSlice, StepBuffer

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, LARGEST_DECODE)
"""Row counts of steps that only decode or verify. On an H200, 33 rows take longer than 64."""
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
"""Row counts of steps with prompt chunks, up to the largest captured one."""
MIXED_BUCKETS = (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096)
"""Row counts of steps with prompt chunks and decoding sequences.

There are fewer, because each number of sequences is another shape, and the first steps of a shape are launched
kernel by kernel, which takes the host 35 ms each."""
MIXED_DECODE_BUCKETS = (0, 8, 32, 64, 128, 256)
"""Rows of decoding sequences in a step with prompt chunks. Every combination needs a graph."""
MAX_DECODE_WIDTH = 2 * WIDEST
"""Largest number of new tokens of a sequence in the decode part. More are a prompt chunk."""
DRAFT_STEP_TOKENS = 64
"""Token limit of a step with drafts.

Larger steps have so many shapes that most would be launched kernel by kernel, which costs more than drafts
save."""
_MAX_COVER_PADDING = 1024
"""Largest number of padding tokens in another step's graph.

An H200 computes 1,024 tokens of a 7B model in 15 ms. Launching a step kernel by kernel takes its host 35 ms."""
TOKEN_MULTIPLE = 16
"""Multiple to which longer steps are padded for the gemms."""
_USUAL_DEQUANT_PAGES = 64
"""FP8 pages that suffice for most steps. A graph starts programs for its whole capacity."""


class TokenSpan(NamedTuple):
    """New tokens of one sequence: `width` tokens from position `start` on."""

    slot: int
    start: int
    width: int


class StepShape(NamedTuple):
    """Numbers of a step that are constants of its CUDA graph."""

    tokens: int
    """Tokens of the step."""
    decode_tokens: int
    """Tokens of the decode part, which comes first."""
    decode_sequences: int
    widest: int
    """Largest number of new tokens of a sequence in the decode part."""
    splits: int
    """Ranges into which attention divides a history."""
    prefill_sequences: int
    tiles: int
    """Tiles of prompt chunks."""
    dequant_pages: int = 0
    """Capacity for FP8 pages that are dequantized for the prompt chunks."""
    one_page: bool = False
    """Each range of a history fits in a page, so decode_fused can run."""

    def may_cover(self, other: "StepShape") -> bool:
        """Return True if a graph of this shape may run a step of the other shape.

        Whether the step fits is known once it is built."""
        return (
            self.widest == other.widest == 1
            and not self.one_page
            and bool(self.tiles) == bool(other.tiles)
            and other.tokens <= self.tokens <= other.tokens + _MAX_COVER_PADDING
            and self.decode_tokens >= other.decode_tokens
            and self.prefill_sequences >= other.prefill_sequences
            and self.dequant_pages == other.dequant_pages
        )


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Properties of model and device that decide a step's layout."""

    heads: int
    key_heads: int
    head_dim: int
    page_tokens: int
    sms: int
    """Multiprocessors of the GPU."""
    fp8_kv: bool = False
    """The KV cache stores 8-bit codes."""
    context_tokens: int = PAGE_TOKENS
    """Limit of a sequence in tokens, including padding."""
    latents: bool = False
    """The KV cache stores latents."""
    states: bool = False
    """The model has running states, which read the position of each token in its sequence."""
    prefill_tile: prefill_attention.PrefillTileConfig | None = None
    """Tile config of the fastest kernel for prompt chunks over fp16 pages; None: the portable one."""

    def tile_config(self, pages: int) -> prefill_attention.PrefillTileConfig:
        """Return the tile config of a step with capacity for `pages` dequantized pages.

        Only the portable kernel reads 8-bit codes."""
        reads_codes = self.fp8_kv and not pages
        if self.prefill_tile is not None and not reads_codes:
            return self.prefill_tile
        return prefill_attention.tile_config_for(self.head_dim)


@dataclass(frozen=True, slots=True)
class InputBatch:
    """Layout of one step."""

    spans: tuple[TokenSpan, ...]
    """Decode part, then prompt chunks, both with padding. A span without tokens is idle."""
    first: tuple[int, ...]
    """Index of the first token of each row of the plan."""
    shape: StepShape
    tiles: tuple[tuple[int, int], ...]
    tile_config: prefill_attention.PrefillTileConfig
    dequantized: tuple[tuple[int, int], ...]
    """FP8 pages to dequantize for the prompt chunks: slot, and index in its block table."""
    captured: bool
    """A CUDA graph may run this step."""
    chunks: tuple[tuple[int, int], ...] | None = None
    """Chunks of the prompt chunks for delta nets, see ChunkedPart; None: no running states."""
    covered: bool = False
    """The step runs in the graph of a larger one. Its time does not predict that of its tokens."""

    @property
    def all_logits(self) -> bool:
        """True if the step computes the logits of all tokens: a small step without prompt chunks."""
        return self.captured and not self.tiles


def build_input_batch(
    spans: Sequence[TokenSpan],
    config: BatchConfig,
    scratch: int,
    cover: StepShape | None = None,
    max_decode_width: int = MAX_DECODE_WIDTH,
) -> InputBatch:
    """Order and pad the spans of a step, which have at least one token each.

    Padding is text of the slot `scratch`, because rows without a sequence would read unwritten memory. `cover`:
    a shape that may cover the step's own (StepShape.may_cover). The result has it if the step fits.
    `max_decode_width`: wider spans are prompt chunks."""
    if config.states:
        # A state processes the tokens of a span in order, so spans must not be split.
        max_decode_width = min(max_decode_width, WIDEST)
    if sum(span.width for span in spans if span.width <= max_decode_width) > DRAFT_STEP_TOKENS:
        # The wider ones are short prompts. Steps of prompt chunks are likelier to have a graph.
        max_decode_width = 1
    decode_rows = [row for row, span in enumerate(spans) if span.width <= max_decode_width]
    prefill_rows = [row for row, span in enumerate(spans) if span.width > max_decode_width]
    decode_used = sum(spans[row].width for row in decode_rows)
    prefill_used = sum(spans[row].width for row in prefill_rows)
    decode_tokens, tokens, captured = _padded(decode_used, prefill_used)
    if cover is not None:
        room = cover.tokens - cover.decode_tokens
        if decode_used > cover.decode_tokens or prefill_used > room:
            cover = None
        else:
            decode_tokens = cover.decode_tokens
            tokens = cover.tokens
    first = [0] * len(spans)
    for rows, token in ((decode_rows, 0), (prefill_rows, decode_tokens)):
        for row in rows:
            first[row] = token
            token += spans[row].width
    decode = [part for row in decode_rows for part in _split_drafts(spans[row])]
    widest = WIDEST if any(span.width > 1 for span in decode) else 1
    decode += _padding(decode_tokens - decode_used, widest, scratch)
    prefill = [spans[row] for row in prefill_rows]
    # Padding must not be longer than the block table of `scratch`, after which other slots' entries follow.
    prefill += _padding(tokens - decode_tokens - prefill_used, config.context_tokens, scratch)
    pages = _page_capacity(prefill, config)
    dequantized: list[tuple[int, int]] = []
    if pages:
        dequantized = _pages(prefill, config.page_tokens)
    tile_config = config.tile_config(pages)
    counts = [span.width for span in prefill]
    ends = [span.start + span.width for span in prefill]
    tiles = prefill_attention.tiles_of(counts, ends, tile_config.rows)
    if captured and decode and widest > 1:
        decode += _idle(power_of_two(len(decode)) - len(decode), scratch)
    if prefill:
        # The arrays of the prompt chunks follow those of the decode part and must be aligned, too.
        decode += _idle(-len(decode) % ALIGNED_WORDS, scratch)
    if captured and prefill:
        # Tiles without work belong to an idle sequence, so at least one is needed.
        sequences = _power_of_eight(len(prefill) + 1)
        if cover is not None:
            sequences = max(sequences, cover.prefill_sequences)
        prefill += _idle(sequences - len(prefill), scratch)
        max_tiles = -(-(tokens - decode_tokens) // tile_config.rows) + len(prefill)
        tiles += [(len(prefill) - 1, 0)] * (max_tiles - len(tiles))
    longest = max((span.start + span.width for span in decode), default=0)
    splits = _splits(len(decode), longest, widest, config, coarse=bool(prefill))
    if cover is not None:
        splits = cover.splits
    few = widest == 1 and len(decode) <= decode_fused.MOST_SEQUENCES and not prefill
    one_page = few and splits * config.page_tokens >= max(span.start + 1 for span in decode)
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
        covered=cover is not None,
    )


def _padded(decode: int, prefill: int) -> tuple[int, int, bool]:
    """Return the tokens of the decode part, of the step, and whether graphs are captured."""
    total = decode + prefill
    if not prefill and total <= DECODE_BUCKETS[-1]:
        tokens = next(bucket for bucket in DECODE_BUCKETS if total <= bucket)
        return tokens, tokens, True
    if prefill and decode <= DECODE_BUCKETS[-1]:
        decode_tokens = next(bucket for bucket in MIXED_DECODE_BUCKETS if decode <= bucket)
        used = decode_tokens + prefill
        buckets = MIXED_BUCKETS if decode_tokens else PREFILL_BUCKETS
        tokens = next((bucket for bucket in buckets if used <= bucket), 0)
        if tokens:
            return decode_tokens, tokens, True
    tokens = -(-total // TOKEN_MULTIPLE) * TOKEN_MULTIPLE
    return decode if prefill else tokens, tokens, False


def _padding(missing: int, max_width: int, scratch: int) -> list[TokenSpan]:
    return [
        TokenSpan(scratch, 0, min(max_width, missing - first))
        for first in range(0, missing, max_width)
    ]


def _idle(missing: int, scratch: int) -> list[TokenSpan]:
    return [TokenSpan(scratch, 0, 0)] * missing


def _power_of_eight(count: int) -> int:
    """Round up to a power of eight."""
    return 1 << -(-(count - 1).bit_length() // 3) * 3


def _page_capacity(prefill: Sequence[TokenSpan], config: BatchConfig) -> int:
    """Return the FP8 pages that a step can dequantize; 0: its prompt chunks read codes.

    Codes are read if no faster kernel supports the dequantized pages, or if the histories are too long."""
    hopper = config.prefill_tile == prefill_attention.HOPPER
    if not (prefill and config.fp8_kv and hopper):
        return 0
    count = len(_pages(prefill, config.page_tokens))
    limit = dequant_pages(config.key_heads, config.head_dim)
    capacities = (_USUAL_DEQUANT_PAGES, limit)
    return next((capacity for capacity in capacities if count <= capacity <= limit), 0)


def _pages(prefill: Sequence[TokenSpan], page_tokens: int) -> list[tuple[int, int]]:
    """Return slot and index in its block table of every page that the chunks read."""
    ends = {span.slot: span.start + span.width for span in prefill}
    return [(slot, n) for slot, end in ends.items() for n in range(-(-end // page_tokens))]


def _chunks(prefill: Sequence[TokenSpan], captured_tokens: int) -> tuple[tuple[int, int], ...]:
    """Return the sequence and its chunk for every chunk of running states.

    `captured_tokens`: pad with (-1, 0) to the chunks that a graph of so many tokens can have; 0: no graph."""
    chunks = [
        (number, chunk)
        for number, span in enumerate(prefill)
        for chunk in range(-(-span.width // CHUNK))
    ]
    if captured_tokens:
        max_chunks = -(-captured_tokens // CHUNK) + len(prefill)
        chunks += [(-1, 0)] * (max_chunks - len(chunks))
    return tuple(chunks)


def moved_shape(shape: StepShape, longest: int, config: BatchConfig) -> StepShape:
    """Return the shape of a step of single tokens. `longest`: tokens of its longest text."""
    splits = _splits(shape.decode_sequences, longest, 1, config, coarse=False)
    few = shape.decode_sequences <= decode_fused.MOST_SEQUENCES
    one_page = few and splits * config.page_tokens >= longest
    return shape._replace(splits=splits, one_page=one_page)


def _splits(sequences: int, longest: int, widest: int, config: BatchConfig, *, coarse: bool) -> int:
    """Return the ranges of a history of `longest` tokens, a power of two to limit graphs.

    `coarse`: a power of four, for steps with prompt chunks, which take longer than the decode part."""
    if not sequences:
        return 0
    rows = 64
    max_splits = decode_attention.MOST_SPLITS
    resident = decode_attention.programs_for(config.fp8_kv, sequences, widest)
    if config.latents:
        rows = decode_attention.LATENT_ROWS
        max_splits = decode_attention.MOST_LATENT_SPLITS
        resident = 1
    elif longest >= decode_attention.LONG_TOKENS:
        max_splits = decode_attention.MOST_LONG_SPLITS
    blocks = -(-config.heads // config.key_heads * widest // rows)
    splits = decode_attention.splits_for(
        sequences,
        config.key_heads,
        blocks,
        longest,
        config.page_tokens,
        config.sms * resident,
        max_splits,
    )
    if coarse:
        return 1 << (splits.bit_length() - 1) // 2 * 2
    if splits < -(-longest // config.page_tokens):
        return 1 << splits.bit_length() - 1
    # Each range is a page. One range of two pages would take as long as if all ranges had two: 8 ranges of 300
    # tokens take 3.5 us per layer, and 4 take 6.0 us (H200).
    return 1 << (splits - 1).bit_length()


def _split_drafts(span: TokenSpan) -> list[TokenSpan]:
    """Split a span into parts that the decode kernel supports.

    A long draft becomes two neighbors in the same slot. That is correct because all keys of a layer are written
    before any key is read."""
    slot, start, count = span
    if count == 1 or count > MAX_DECODE_WIDTH:
        return [span]
    return [
        TokenSpan(slot, start + offset, min(WIDEST, count - offset))
        for offset in range(0, count, WIDEST)
    ]


class BatchSlices(NamedTuple):
    """Arrays of an InputBatch in the step buffer, in this order.

    Steps of the same shape have them at the same addresses."""

    ids: BufferSlice
    """Indices into the token table, int64 [T]."""
    positions: BufferSlice
    slots: BufferSlice
    starts: BufferSlice
    """First row of each sequence [S]. The next three arrays are also [S]."""
    counts: BufferSlice
    lengths: BufferSlice
    sequence_slots: BufferSlice
    tiles: BufferSlice
    dequantized: BufferSlice
    offsets: BufferSlice | None = None
    """Offsets of tokens from the first token of their sequence [T]; None: no running states."""
    chunks: BufferSlice | None = None
    """Chunks of delta nets; None: no running states."""


def write_batch(batch: InputBatch, buffer: StepBuffer, table: StateTable) -> BatchSlices:
    """Write a layout to an empty buffer."""
    spans = batch.spans
    widths = np.array([span.width for span in spans], np.int64)
    first = np.cumsum(widths) - widths
    starts = np.array([span.start for span in spans], np.int64)
    positions = np.arange(batch.shape.tokens) + np.repeat(starts - first, widths)
    slots = np.repeat(np.array([span.slot for span in spans], np.int64), widths)
    entries = slots * table.columns + positions
    ids = np.where(slots == table.scratch, table.padding_index, entries)
    lengths = [max(1, span.start + span.width) for span in spans]
    unused = [-1] * (2 * (batch.shape.dequant_pages - len(batch.dequantized)))
    slices = BatchSlices(
        ids=buffer.write(ids, int64=True),
        positions=buffer.write(positions),
        slots=buffer.write(slots),
        starts=buffer.write(first),
        counts=buffer.write(widths),
        lengths=buffer.write(lengths),
        sequence_slots=buffer.write([span.slot for span in spans]),
        tiles=buffer.write([number for tile in batch.tiles for number in tile]),
        dequantized=buffer.write(
            [number for page in batch.dequantized for number in page] + unused
        ),
    )
    if batch.chunks is None:
        return slices
    offsets = np.arange(batch.shape.tokens) - np.repeat(first, widths)
    chunks = [number for chunk in batch.chunks for number in chunk]
    return slices._replace(offsets=buffer.write(offsets), chunks=buffer.write(chunks))


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Sequences of the prompt chunks."""

    batch: AttentionBatch
    tiles: torch.Tensor
    """Tiles of `tile_config` rows, from kernels.attention.prefill.tiles_of."""
    tile_config: prefill_attention.PrefillTileConfig
    dequant_pages: torch.Tensor | None
    """FP8 pages to dequantize first, see kv_fp8_dequant; None: pages are read as they are."""
    chunks: torch.Tensor | None = None
    """Chunks for running states, see ChunkedPart; None: the model has none."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Step on the device, int32 unless stated."""

    ids: torch.Tensor
    """Token ids [T]."""
    positions: torch.Tensor
    """[T]"""
    slots: torch.Tensor
    """[T]"""
    block_tables: torch.Tensor
    """[slots, pages of the longest sequence]"""
    window_tables: torch.Tensor
    """Block tables of layers with their own window pages."""
    logits_indices: torch.Tensor | None
    """Tokens whose last state is needed, int64 [P]; None: all tokens."""
    tokens: Tokens | None
    """Positions of the tokens for running states; None: the model has none."""
    shape: StepShape
    batch: AttentionBatch
    """All sequences, in the two parts that follow."""
    decode: AttentionBatch | None
    """Sequences of the decode part, whose tokens come first, if there are any."""
    prefill: PrefillBatch | None


def model_inputs(
    batch: InputBatch,
    slices: BatchSlices,
    table: StateTable,
    logits_indices: torch.Tensor | None,
) -> ModelInputs:
    """Return the step on the device. Token ids and block tables are those of `table`."""
    starts = slices.starts.view()
    counts = slices.counts.view()
    lengths = slices.lengths.view()
    slots = slices.sequence_slots.view()

    def part(sequences: slice) -> AttentionBatch:
        return AttentionBatch(
            starts[sequences],
            counts[sequences],
            lengths[sequences],
            slots[sequences],
            table.block_tables,
        )

    decode: AttentionBatch | None = None
    prefill: PrefillBatch | None = None
    tokens: Tokens | None = None
    if slices.offsets is not None:
        tokens = Tokens(slices.slots.view(), slices.positions.view(), slices.offsets.view())
    shape = batch.shape
    first_prefill = shape.decode_sequences
    if first_prefill:
        decode = part(slice(0, first_prefill))
    if shape.tiles:
        tiles = slices.tiles.view().view(-1, 2)
        dequantized: torch.Tensor | None = None
        chunks: torch.Tensor | None = None
        if shape.dequant_pages:
            dequantized = slices.dequantized.view().view(-1, 2)
        if slices.chunks is not None:
            chunks = slices.chunks.view().view(-1, 2)
        prefill = PrefillBatch(
            part(slice(first_prefill, None)), tiles, batch.tile_config, dequantized, chunks
        )
    return ModelInputs(
        ids=torch.index_select(table.token_table, 0, slices.ids.view()),
        positions=slices.positions.view(),
        slots=slices.slots.view(),
        block_tables=table.block_tables,
        window_tables=table.window_tables,
        logits_indices=logits_indices,
        tokens=tokens,
        shape=shape,
        batch=part(slice(None)),
        decode=decode,
        prefill=prefill,
    )
