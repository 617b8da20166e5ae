"""Decode attention: 1 to 16 new tokens per sequence (decode, draft verification), split-KV.

Letters as in reference.py; R = H / J query heads share a key head, W = `widest` new tokens of a
sequence.

The kernel reads the sequence's pages once for each key head: all R heads and all new tokens of a
sequence are packed as rows of one tile (row = token * R + head), and its length is divided into
`splits` ranges of whole pages so that one long sequence fills the GPU. Each range leaves an
unnormalized sum in fp32 with its running maximum and mass. A second kernel merges them in a fixed
order and writes the activation format of the next gemm.

    q    [T, H, D] fp16 or bf16      k, v  [pages, J, P, D], or FP8 bytes (kv_fp8.py)
    q    [T, H, D + E]               k     [pages, 1, P, D + E] of latents, read once for both products
    sums fp32 [splits, T, H*D], peaks and masses fp32 [splits, T, H] (peaks in log2, -inf: an empty
    range)

Grid (S * J * row blocks, splits); merging (H*D / 128, T). fp32 accumulation; lengths and table
widths are runtime values, so a longer context needs no recompilation. The result of a row depends
on `splits` and the sequence's length alone. Flash-Decoding (Dao et al., 2023); packing heads and
tokens: exllamav3, vLLM.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.attention import kv_fp8
from localchat_cuda.kernels.attention.reference import (
    AttentionBatch,
    AttentionShape,
    Rules,
    check,
    check_sinks,
    tail_of,
)
from localchat_cuda.kernels.int4.activations import (
    Rows,
    check_rows,
    format_of,
    prepare,
    room_of,
    write_rows,
)
from localchat_cuda.kernels.launch import (
    CARVEOUT_ROWS,
    KernelLaunch,
    Traits,
    cdiv,
    own_carveout,
    power_of_two,
    release,
    require,
    tensor_or,
    traits,
    wait,
)
from localchat_cuda.kernels.rope import Cache

WIDEST = 16
LATENT_ROWS = 32
"""Maximum rows of a tile over latent keys.

Their queries take twice the shared memory of the widest other ones.
"""
_LATENT_FEW = 8
"""Sequences up to which two stages are as good as three, over latents."""
MOST_SPLITS = 16
MOST_LONG_SPLITS = 32
MOST_LATENT_SPLITS = 64
"""Ranges of a sequence. At 7,000 tokens of one stream, 32 save nothing and cost 2 us in merging; at 32,000 they
take 27 us, and 16 take 35. Latents have one key head, and so fewer programs: there, 64 take 14 us at 7,000
tokens, and 16 take 48."""
LONG_TOKENS = 16_384
"""Length from which a sequence has MOST_LONG_SPLITS."""
LOG2E = tl.constexpr(1.4426950408889634)


class DecodeTileConfig(NamedTuple):
    """Tile sizes and launch parameters of the decode kernel."""

    tile: int
    """Keys per tile; divides the page."""
    warps: int
    stages: int
    """Pipeline stages."""
    small: bool = True
    """Whether a multiprocessor has the small shared memory of the other decode kernels (`launch.set_carveout`).

    It has room for one program.
    """


def tile_config_for(
    d: int,
    rows: int,
    coded: bool = False,
    crowded: bool = False,
    roomy: bool = False,
    many: bool = False,
) -> DecodeTileConfig:
    """Choose the tile config by head dimension and rows per tile.

    With `many` sequences of one new token twice the warps take 5 to 10 % less (16 and 32 sequences of 300 and
    1,000 tokens, inside a whole step).
    An FP8 cache (`coded`) takes half the shared memory: one more stage keeps as many bytes in flight.
    `crowded`: more programs than multiprocessors, so two programs share one and both must fit. `roomy`: see
    Traits; wide heads then take 0.45 to 0.85 of the time (H200).
    """
    if d > 256:
        return DecodeTileConfig(16, 4, 2)
    if coded:
        if d > 128:
            return DecodeTileConfig(32, 4, 3, not crowded)
        stages = 2
        if rows == 16:
            stages = 3 if crowded else 4
        return DecodeTileConfig(64, 4, stages, not crowded)
    if d <= 128:
        return DecodeTileConfig(64, 8 if many else 4, 3 if rows == 16 else 2)
    if not roomy:
        return DecodeTileConfig(32, 4, 2)
    return DecodeTileConfig(64, 4, 3 if rows <= 32 else 2, small=False)


def latent_tile_config_for(d: int, rows: int, sequences: int, gpu: Traits) -> DecodeTileConfig:
    """Choose the tile config for latents, whose keys are also their values.

    Where shared memory has room, tiles of 64 keys take 0.4 to 0.7 of the time of those of 16 (H200).
    """
    if not gpu.roomy:
        return tile_config_for(d, rows)
    return DecodeTileConfig(64, 4, 3 if sequences > _LATENT_FEW else 2, small=False)


class Partials(NamedTuple):
    """Workspace between the two kernels; shapes in the module docstring."""

    sums: torch.Tensor
    peaks: torch.Tensor
    masses: torch.Tensor

    @staticmethod
    def empty(splits: int, tokens: int, heads: int, d: int, device: torch.device) -> "Partials":
        return Partials(
            torch.empty(splits, tokens, heads * d, device=device),
            torch.empty(splits, tokens, heads, device=device),
            torch.empty(splits, tokens, heads, device=device),
        )


def splits_for(
    sequences: int,
    key_heads: int,
    row_blocks: int,
    longest: int,
    page: int,
    target: int,
    max_splits: int = MOST_SPLITS,
) -> int:
    """Compute the number of ranges per sequence.

    There are at most `max_splits` ranges, for `target` programs in total, and each has at least a page.
    """
    programs = max(1, sequences * key_heads * row_blocks)
    return max(1, min(target // programs, -(-longest // page), max_splits))


def programs_for(coded: bool, sequences: int, widest: int) -> int:
    """Return the programs per multiprocessor.

    An FP8 cache brings half the bytes for the same arithmetic, so two programs hide each other's latency. So do
    two where there is shared memory for them: 32 sequences at 1,000 tokens take 24 us a layer, not 30 (H200).
    """
    if coded or (widest == 1 and own_carveout(sequences)):
        return 2
    return 1


@triton.jit
def capped(logits, SOFT_CAP: tl.constexpr):
    """Apply the cap of Rules to logits in log2, if there is one."""
    if SOFT_CAP > 0.0:
        squeezed = 1.0 - 2.0 / (tl.exp2(logits * (2.0 / SOFT_CAP)) + 1.0)
        logits = squeezed * (SOFT_CAP * LOG2E)
    return logits


@triton.jit(do_not_specialize=["width", "T"])
def _decode_kernel(
    q,
    cache,
    batch,
    partials,
    scale,
    width,
    T,
    shape: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    # elements per token in the pages: numbers, or words of two FP8 bytes
    D: tl.constexpr = shape.D
    P: tl.constexpr = shape.P
    TILE: tl.constexpr = shape.TILE
    CODED: tl.constexpr = shape.CODED
    E: tl.constexpr = shape.E
    D_POW2: tl.constexpr = triton.next_power_of_2(D)
    ROW: tl.constexpr = D // 2 if CODED else D
    ROW_POW2: tl.constexpr = D_POW2 // 2 if CODED else D_POW2
    STEP: tl.constexpr = ROW + E
    R: tl.constexpr = shape.H // shape.J
    release(PDL)
    # no kernel of the chain writes lengths and tables, so they are read before the wait
    pid = tl.program_id(0)
    sequence = pid // (shape.J * ROW_BLOCKS)
    group = pid // ROW_BLOCKS % shape.J
    split = tl.program_id(1)
    start = tl.load(batch.starts + sequence)
    count = tl.load(batch.counts + sequence)
    length = tl.load(batch.lengths + sequence)
    table = batch.tables + tl.load(batch.slots + sequence).to(tl.int64) * width
    tiles = tl.cdiv(length, TILE)
    oldest = 0
    if shape.WINDOW > 0:
        oldest = tl.maximum(length - count - shape.WINDOW + 1, 0) // TILE
    share = tl.cdiv(tiles - oldest, tl.num_programs(1))
    low = oldest + split * share
    high = tl.minimum(low + share, tiles)
    page = tl.load(table + tl.minimum(low, tiles - 1) * TILE // P)
    wait(PDL)
    r = pid % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    token = r // R
    valid = token < count
    head = group * R + r % R
    position = length - count + token
    d = tl.arange(0, ROW_POW2)
    n = tl.arange(0, TILE)
    q_at = ((start + token) * shape.H + head)[:, None] * (D + E) + d[None, :]
    inside = valid[:, None] & (d < ROW)[None, :]
    query = tl.load(q + q_at, mask=inside, other=0.0)
    if E > 0:
        e = tl.arange(0, E)
        tail_at = ((start + token) * shape.H + head)[:, None] * (D + E) + D + e[None, :]
        query_tail = tl.load(q + tail_at, mask=valid[:, None], other=0.0)
    if CODED:
        query = query.to(tl.float16)
        query_high = tl.load(q + q_at + ROW, mask=inside, other=0.0).to(tl.float16)
        acc_high = tl.zeros((ROWS, ROW_POW2), tl.float32)
        mark_at = page.to(tl.int64) * cache.mark_stride + group * P + low * TILE % P + n
        mark = tl.load(cache.marks + mark_at, mask=low * TILE + n < length, other=0).to(tl.int32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, ROW_POW2), tl.float32)
    for tile in tl.range(low, high, 1, num_stages=shape.STAGES):
        key = tile * TILE + n
        cell = page.to(tl.int64) * cache.page_stride + group * (P * STEP) + tile * TILE % P * STEP
        page = tl.load(table + tl.minimum(tile + 1, tiles - 1) * TILE // P)
        if CODED:
            # exponents are too small for the pipeline, so they are loaded by hand, one tile ahead
            factor, lift = kv_fp8.factors(mark)
            mark_at = page.to(tl.int64) * cache.mark_stride + group * P + (tile + 1) * TILE % P + n
            mark = tl.load(cache.marks + mark_at, mask=key + TILE < length, other=0).to(tl.int32)
        if E > 0:
            keys = tl.load(cache.k + cell + D + n[None, :] * STEP + e[:, None])
            there = (key < length)[:, None]
        elif D == D_POW2:
            keys = tl.load(cache.k + cell + n[None, :] * ROW + d[:, None])
            there = (key < length)[:, None]
        else:
            keys = tl.load(
                cache.k + cell + n[None, :] * ROW + d[:, None], mask=(d < ROW)[:, None], other=0
            )
            there = (key < length)[:, None] & (d < ROW)[None, :]
        # values past the length may be anything, NaN too, and 0 * NaN would spoil the sum
        values = tl.load(cache.v + cell + n[:, None] * STEP + d[None, :], mask=there, other=0)
        if CODED:
            keys, keys_high = kv_fp8.decode(keys, CODED)
            logits = tl.dot(query_high, keys_high, tl.dot(query, keys)) * (factor * scale)[None, :]
        elif E > 0:
            logits = tl.dot(query, tl.trans(values), tl.dot(query_tail, keys)) * scale
        else:
            logits = tl.dot(query, keys.to(query.dtype)) * scale
        logits = capped(logits, shape.SOFT_CAP)
        if CODED:
            logits += lift[None, :]
        seen = (key[None, :] <= position[:, None]) & (key < length)[None, :]
        if shape.WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - shape.WINDOW)
        logits = tl.where(seen, logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - anchor[:, None])
        decay = tl.exp2(peak - anchor)
        if CODED:
            values, values_high = kv_fp8.decode(values, CODED)
            acc_high = tl.dot(weights.to(tl.float16), values_high, acc_high * decay[:, None])
            acc = tl.dot(weights.to(tl.float16), values, acc * decay[:, None])
            weights = weights * tl.exp2(-lift)[None, :]
        else:
            acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc * decay[:, None])
        mass = mass * decay + tl.sum(weights, 1)
        peak = higher
    row = (split * T + start + token) * shape.H + head
    tl.store(partials.peaks + row, peak, mask=valid)
    tl.store(partials.masses + row, mass, mask=valid)
    if low < high:
        out = partials.sums + row[:, None].to(tl.int64) * D + d[None, :]
        tl.store(out, acc, mask=inside)
        if CODED:
            tl.store(out + ROW, acc_high, mask=inside)


@triton.jit(do_not_specialize=["T"])
def _merge_kernel(
    partials,
    out,
    factors,
    sinks,
    T,
    H: tl.constexpr,
    D: tl.constexpr,
    SUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    MQ: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    group = tl.program_id(0)
    t = tl.program_id(1)
    i = group * 128 + tl.arange(0, 128)
    s = tl.arange(0, triton.next_power_of_2(SPLITS))
    columns = i < H * D
    wait(PDL)
    if D % 128 == 0:
        # a group lies within one head, so each range has one weight
        offsets = (s * T + t) * H + group * 128 // D
        peak = tl.load(partials.peaks + offsets, mask=s < SPLITS, other=float("-inf"))
        top = tl.max(peak, 0)
        weight = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top))
        mass = tl.sum(weight * tl.load(partials.masses + offsets, mask=s < SPLITS, other=0.0), 0)
        if SUNK:
            mass += tl.exp2(tl.load(sinks + group * 128 // D).to(tl.float32) * LOG2E - top)
        cell = ((s * T + t) * (H * D)).to(tl.int64)[:, None] + i[None, :]
        parts = tl.load(partials.sums + cell, mask=(peak > float("-inf"))[:, None], other=0.0)
        value = tl.sum(parts * weight[:, None], 0) / tl.where(mass == 0.0, 1.0, mass)
    elif 128 % D == 0:
        # a group has whole heads
        head = group * (128 // D) + tl.arange(0, 128 // D)
        offsets = ((s * T + t) * H)[:, None] + head[None, :]
        there = (s < SPLITS)[:, None] & (head < H)[None, :]
        peak = tl.load(partials.peaks + offsets, mask=there, other=float("-inf"))
        top = tl.max(peak, 0)
        weight = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)[None, :])
        mass = tl.sum(weight * tl.load(partials.masses + offsets, mask=there, other=0.0), 0)
        if SUNK:
            sink = tl.load(sinks + head, mask=head < H, other=0.0).to(tl.float32)
            mass += tl.exp2(sink * LOG2E - top)
        cell = offsets.to(tl.int64)[:, :, None] * D + tl.arange(0, D)[None, None, :]
        full = (peak > float("-inf"))[:, :, None]
        parts = tl.load(partials.sums + cell, mask=full, other=0.0)
        value = tl.sum(parts * weight[:, :, None], 0) / tl.where(mass == 0.0, 1.0, mass)[:, None]
        value = tl.reshape(value, (128,))
    else:
        there = (s < SPLITS)[:, None] & columns[None, :]
        offsets = ((s * T + t) * H)[:, None] + (i // D)[None, :]
        peak = tl.load(partials.peaks + offsets, mask=there, other=float("-inf"))
        top = tl.max(peak, 0)
        share = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top)[None, :])
        mass = tl.sum(share * tl.load(partials.masses + offsets, mask=there, other=0.0), 0)
        if SUNK:
            sink = tl.load(sinks + i // D, mask=columns, other=0.0).to(tl.float32)
            mass += tl.exp2(sink * LOG2E - top)
        full = there & (peak > float("-inf"))
        cell = ((s * T + t) * (H * D)).to(tl.int64)[:, None] + i[None, :]
        parts = tl.load(partials.sums + cell, mask=full, other=0.0)
        value = tl.sum(parts * share, 0) / tl.where(mass == 0.0, 1.0, mass)
    if FORMAT == 3:
        tl.store(out + t * (H * D) + i, value.to(out.dtype.element_ty), mask=columns)
    else:
        row = t + tl.arange(0, 1)
        write_rows(value[None, :], out, factors, group, row, row < T, H * D, MQ, FORMAT, GROUP)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: AttentionBatch,
    widest: int,
    partials: Partials,
    rules: Rules | None = None,
    *,
    exponents: torch.Tensor | None = None,
    config: DecodeTileConfig | None = None,
) -> None:
    """Fill `partials` for every sequence of the batch.

    `widest` is the largest of `batch.counts` (1..16). With `exponents` k and v are FP8 bytes. With PDL the
    batch is read before the kernel waits for its predecessor: the kernel that writes it must have ended, or
    must not release its dependents early.
    """
    check(q, k, v, batch, exponents)
    t, h, width = q.shape
    j = k.shape[1]
    page = k.shape[2]
    tail = tail_of(k, v)
    d = width - tail
    splits = partials.sums.shape[0]
    if not 1 <= widest <= WIDEST:
        raise ValueError(f"widest: 1 to {WIDEST} new tokens wanted, {widest} given")
    require("partials.sums", partials.sums, (splits, t, h * d), q.device, torch.float32)
    for name, part in (("peaks", partials.peaks), ("masses", partials.masses)):
        require(f"partials.{name}", part, (splits, t, h), q.device, torch.float32)
    rows = min(LATENT_ROWS if tail else 64, max(16, power_of_two(h // j * widest)))
    blocks = cdiv(h // j * widest, rows)
    programs = batch.starts.shape[0] * j * blocks
    decoder = traits(q.device)
    coded = exponents is not None
    crowded = programs * splits > decoder.sms
    rules = rules or Rules()
    if config is None and tail:
        config = latent_tile_config_for(d, rows, batch.starts.shape[0], decoder)
    many = rows == 16 and t >= CARVEOUT_ROWS
    config = config or tile_config_for(d, rows, coded, crowded, decoder.roomy, many)
    if page % config.tile:
        raise ValueError(f"config: a tile of {config.tile} keys does not divide a page of {page}")
    scale = rules.scale_for(width) * LOG2E.value
    codes = kv_fp8.decoder_for(exponents, q.device)
    tile = (config.tile, config.stages)
    shape = AttentionShape(h, j, d, page, *tile, rules.window, rules.soft_cap, codes, tail)
    grid = (programs, splits)
    step_rows = 0
    if config.small:
        step_rows = t
    KernelLaunch(_decode_kernel, grid, decoder, warps=config.warps, rows=step_rows).run(
        *(q, Cache.of(k, v, exponents), batch, partials, scale, batch.tables.shape[1], t, shape),
        *(rows, blocks),
    )


def merge(
    partials: Partials,
    out: torch.Tensor | Rows,
    *,
    order: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merge the ranges into `out` [T, H*D], with the `sinks` of Rules.

    fp16, bf16, fp32, or the activations of an int4 gemm. Activations may have their columns in the stored
    `order` (int32 [H*D]) of the weight. A kernel of its own reorders them, so that out-of-order columns are
    read once and not from each range.
    """
    splits, t, columns = partials.sums.shape
    h = partials.peaks.shape[2]
    device = partials.sums.device
    if isinstance(out, torch.Tensor):
        if order is not None:
            raise ValueError("order: only the activations of a W4 product can be written in one")
        require("out", out, (t, columns), device)
        target = out
        factors = out
        variant = 3
        room = 0
        group = 128
    elif order is not None:
        flat = torch.empty(t, columns, device=device)
        merge(partials, flat, sinks=sinks)
        prepare("plain", flat[None], out, order=order)
        return
    else:
        check_rows(out, t, columns, device)
        target = out.x
        factors = out.factors
        variant = format_of(out)
        room = room_of(out)
        group = out.group
    check_sinks(sinks, h, device)
    gpu = traits(device)
    grid = (cdiv(columns, 128), t)
    warps = 4
    if splits <= 8:
        warps = 1
    KernelLaunch(_merge_kernel, grid, gpu, warps, rows=t).run(
        *(partials, target, factors, tensor_or(sinks, partials.peaks), t),
        H=h,
        D=columns // h,
        SUNK=sinks is not None,
        SPLITS=splits,
        MQ=room,
        FORMAT=variant,
        GROUP=group,
    )
