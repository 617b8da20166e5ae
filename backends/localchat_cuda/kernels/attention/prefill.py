"""Prefill attention: many new tokens per sequence, over paged keys and values.

Letters as in reference.py; M queries per tile. The host divides each sequence's new tokens into tiles
of M and lists them, longest history first, so that the last programs to start are short:

    tiles int32 [tiles, 2]: (index into the batch, first new token of the tile), made by `tiles_of`
    q, out  [T, H, D] fp16 or bf16      k, v  [pages, J, P, D], or FP8 bytes (kv_fp8.py)
    q       [T, H, D + E]               k     [pages, 1, P, D + E] of latents, read once for both products

Grid (tiles, H): a program owns one tile of one head; heads that share keys find them in the L2
cache. Key tiles visible to every query run without masks; the last ones, and with a window the first
ones, run with masks; those before the window of all queries are skipped. fp32 accumulation, exp2
with the scale folded in. Hopper GPUs have a kernel of their own for the common case
(prefill_hopper.py); `best_tile_config` chooses between the two.
FlashAttention-2 (Dao, 2023); block tables as in vLLM's Triton attention.
"""

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.attention import kv_fp8
from localchat_cuda.kernels.attention.decode import LOG2E, capped
from localchat_cuda.kernels.attention.reference import (
    AttentionBatch,
    AttentionShape,
    Rules,
    check,
    check_sinks,
    tail_of,
)
from localchat_cuda.kernels.launch import launch_kernel, require, tensor_or, traits
from localchat_cuda.kernels.rope import Cache

hopper: ModuleType | None
"""Kernel for Hopper GPUs; None if this Triton has no Gluon, or an incompatible one."""
try:
    hopper = import_module("localchat_cuda.kernels.attention.prefill_hopper")
except ImportError:
    hopper = None


class PrefillTileConfig(NamedTuple):
    """Tile sizes and launch parameters of a prefill kernel."""

    rows: int
    """Queries per tile."""
    tile: int
    """Keys per tile; divides the page."""
    warps: int
    stages: int
    """Pipeline stages."""


LATENTS = PrefillTileConfig(64, 64, 8, 2)
"""Tiles for latents of 512 columns if shared memory suffices.

Their keys are also their values. They take 0.2 of the time of the tiles that every GPU supports (2.9 instead
of 15 ms, for 7,000 tokens and 16 heads on an H200).
"""
HOPPER = PrefillTileConfig(128, 128, 12, 3)
"""Selects the kernel of prefill_hopper.py, which has this tile config and no other."""


def best_tile_config(
    d: int, page_tokens: int, dtype: torch.dtype, device: torch.device, soft_cap: float = 0.0
) -> PrefillTileConfig:
    """Choose the fastest kernel for pages that are not FP8.

    On an H200 HOPPER takes 0.6 of the other kernel's time from 2,048 tokens on, 0.9 at 512, and 1.2 at 128.
    """
    if hopper is not None and hopper.serves(device, dtype, d, page_tokens, soft_cap):
        return HOPPER
    if d > 512 and traits(device).roomy:
        return LATENTS
    return tile_config_for(d)


def tile_config_for(d: int) -> PrefillTileConfig:
    """Choose the tile config of the kernel in this file, by head dimension.

    With 256 columns four warps spill registers and eight do not (compute capability 9; 8.6 spills less). With
    512 a tile of 32 queries leaves room for keys and values in the shared memory of every GPU.
    """
    if d > 256:
        return PrefillTileConfig(32, 16, 8, 2)
    if d <= 128:
        return PrefillTileConfig(64, 64, 4, 3)
    return PrefillTileConfig(64, 32, 8, 2)


def tiles_of(counts: list[int], lengths: list[int], rows: int) -> list[tuple[int, int]]:
    """List the tiles of a batch on the host, longest history first."""
    tiles = [(i, first) for i, count in enumerate(counts) for first in range(0, count, rows)]
    tiles.sort(key=lambda tile: counts[tile[0]] - lengths[tile[0]] - tile[1])
    return tiles


@triton.jit
def _step(
    tile,
    queries,
    acc,
    acc_high,
    peak,
    mass,
    cache,
    sequence,
    scale,
    head,
    shape: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the products with a tile of keys to the sums of queries.

    `queries`: both halves of coded ones, and the columns of latents that are no values. `sequence`: pages,
    positions of the queries, and length. MASKED: some queries may not see some keys.
    """
    query, query_high, query_tail = queries
    table, position, length = sequence
    D: tl.constexpr = shape.D
    D_POW2: tl.constexpr = triton.next_power_of_2(D)
    P: tl.constexpr = shape.P
    TILE: tl.constexpr = shape.TILE
    CODED: tl.constexpr = shape.CODED
    E: tl.constexpr = shape.E
    ROW: tl.constexpr = D // 2 if CODED else D
    STEP: tl.constexpr = ROW + E
    d = tl.arange(0, D_POW2 // 2 if CODED else D_POW2)
    n = tl.arange(0, TILE)
    page = tl.load(table + tile * TILE // P).to(tl.int64)
    cell = page * cache.page_stride + head * (P * STEP) + tile * TILE % P * STEP + n * STEP
    key = tile * TILE + n
    if E > 0:
        if MASKED:
            there = (key < length)[:, None] & (d < ROW)[None, :]
            values = tl.load(cache.v + cell[:, None] + d[None, :], mask=there, other=0)
        else:
            values = tl.load(cache.v + cell[:, None] + d[None, :])
        keys = tl.load(cache.k + cell[None, :] + D + tl.arange(0, E)[:, None])
    elif D == D_POW2:
        keys = tl.load(cache.k + cell[None, :] + d[:, None])
    else:
        keys = tl.load(cache.k + cell[None, :] + d[:, None], mask=(d < ROW)[:, None], other=0)
    if CODED:
        mark_at = page * cache.mark_stride + head * P + tile * TILE % P + n
        if MASKED:
            mark = tl.load(cache.marks + mark_at, mask=key < length, other=0).to(tl.int32)
        else:
            mark = tl.load(cache.marks + mark_at).to(tl.int32)
        factor, lift = kv_fp8.factors(mark)
        keys, keys_high = kv_fp8.decode(keys, CODED)
        logits = tl.dot(query_high, keys_high, tl.dot(query, keys)) * (factor * scale)[None, :]
    elif E > 0:
        logits = tl.dot(query, tl.trans(values), tl.dot(query_tail, keys)) * scale
    else:
        logits = tl.dot(query, keys.to(query.dtype)) * scale
    logits = capped(logits, shape.SOFT_CAP)
    if CODED:
        logits += lift[None, :]
    if MASKED:
        seen = (key[None, :] <= position[:, None]) & (key < length)[None, :]
        if shape.WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - shape.WINDOW)
        logits = tl.where(seen, logits, float("-inf"))
    higher = tl.maximum(peak, tl.max(logits, 1))
    anchor = higher
    if MASKED:
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(logits - anchor[:, None])
    decay = tl.exp2(peak - anchor)
    acc = acc * decay[:, None]
    if E == 0 and MASKED:
        # values past the length may be anything, NaN too, and 0 * NaN would spoil the sum
        there = (key < length)[:, None] & (d < ROW)[None, :]
        values = tl.load(cache.v + cell[:, None] + d[None, :], mask=there, other=0)
    elif E == 0 and D == D_POW2:
        values = tl.load(cache.v + cell[:, None] + d[None, :])
    elif E == 0:
        values = tl.load(cache.v + cell[:, None] + d[None, :], mask=(d < ROW)[None, :], other=0)
    if CODED:
        mass = mass * decay + tl.sum(weights * tl.exp2(-lift)[None, :], 1)
        half = weights.to(tl.float16)
        values, values_high = kv_fp8.decode(values, CODED)
        acc = tl.dot(half, values, acc)
        acc_high = tl.dot(half, values_high, acc_high * decay[:, None])
    else:
        mass = mass * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc)
    return acc, acc_high, higher, mass


@triton.jit(do_not_specialize=["width"])
def _prefill_kernel(
    q,
    cache,
    out,
    tiles,
    batch,
    sinks,
    scale,
    width,
    shape: tl.constexpr,
    M: tl.constexpr,
    SUNK: tl.constexpr,
):
    D: tl.constexpr = shape.D
    ROW: tl.constexpr = D // 2 if shape.CODED else D
    D_POW2: tl.constexpr = triton.next_power_of_2(D)
    ROW_POW2: tl.constexpr = D_POW2 // 2 if shape.CODED else D_POW2
    sequence = tl.load(tiles + tl.program_id(0) * 2)
    first = tl.load(tiles + tl.program_id(0) * 2 + 1)
    head = tl.program_id(1)
    start = tl.load(batch.starts + sequence)
    count = tl.load(batch.counts + sequence)
    length = tl.load(batch.lengths + sequence)
    table = batch.tables + tl.load(batch.slots + sequence).to(tl.int64) * width
    row = first + tl.arange(0, M)
    position = length - count + row
    d = tl.arange(0, ROW_POW2)
    valid = (row < count)[:, None] & (d < ROW)[None, :]
    row_at = ((start + row).to(tl.int64) * shape.H + head)[:, None]
    q_at = row_at * (D + shape.E) + d[None, :]
    out_at = row_at * D + d[None, :]
    query = tl.load(q + q_at, mask=valid, other=0.0)
    query_high = query
    query_tail = query
    acc_high = 0.0
    if shape.E > 0:
        tail_at = row_at * (D + shape.E) + D + tl.arange(0, shape.E)[None, :]
        query_tail = tl.load(q + tail_at, mask=(row < count)[:, None], other=0.0)
    if shape.CODED:
        query = query.to(tl.float16)
        query_high = tl.load(q + q_at + ROW, mask=valid, other=0.0).to(tl.float16)
        acc_high = tl.zeros((M, ROW_POW2), tl.float32)
    before = length - count + first
    last = tl.cdiv(tl.minimum(before + M, length), shape.TILE)
    clear = (before + 1) // shape.TILE
    edge = 0
    peak = tl.full((M,), float("-inf"), tl.float32)
    mass = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, ROW_POW2), tl.float32)
    group = head // (shape.H // shape.J)
    queries = (query, query_high, query_tail)
    rows = (table, position, length)
    if shape.WINDOW > 0:
        low = tl.maximum(before - shape.WINDOW + 1, 0) // shape.TILE
        edge = tl.maximum(tl.cdiv(before + M - shape.WINDOW, shape.TILE), low)
        edge = tl.minimum(edge, last)
        clear = tl.maximum(clear, edge)
        for tile in tl.range(low, edge, 1, num_stages=shape.STAGES):
            acc, acc_high, peak, mass = _step(
                tile, queries, acc, acc_high, peak, mass, cache, rows, scale, group, shape, True
            )
    for tile in tl.range(edge, clear, 1, num_stages=shape.STAGES):
        acc, acc_high, peak, mass = _step(
            tile, queries, acc, acc_high, peak, mass, cache, rows, scale, group, shape, False
        )
    for tile in tl.range(clear, last, 1, num_stages=shape.STAGES):
        acc, acc_high, peak, mass = _step(
            tile, queries, acc, acc_high, peak, mass, cache, rows, scale, group, shape, True
        )
    if SUNK:
        mass += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - peak)
    mass = tl.where(mass == 0.0, 1.0, mass)[:, None]
    tl.store(out + out_at, (acc / mass).to(out.dtype.element_ty), mask=valid)
    if shape.CODED:
        tl.store(out + out_at + ROW, (acc_high / mass).to(out.dtype.element_ty), mask=valid)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: AttentionBatch,
    tiles: torch.Tensor,
    out: torch.Tensor,
    rules: Rules | None = None,
    *,
    exponents: torch.Tensor | None = None,
    config: PrefillTileConfig | None = None,
) -> None:
    """Write attention for the tiles' queries into `out` [T, H, D].

    Other rows of `out` stay as they are. With `exponents` k and v are FP8 bytes. `config` must be the one that
    the tiles were made for (its `rows` are those of `tiles_of`); HOPPER only if `best_tile_config` returned it,
    and without `exponents`.
    """
    check(q, k, v, batch, exponents)
    t, h, width = q.shape
    tail = tail_of(k, v)
    d = width - tail
    require("out", out, (t, h, d), q.device, q.dtype)
    require("tiles", tiles, (None, 2), q.device, torch.int32)
    if tiles.shape[0] == 0:
        return
    rules = rules or Rules()
    config = config or tile_config_for(width)
    check_sinks(rules.sinks, h, q.device)
    if config == HOPPER:
        if hopper is None or exponents is not None or tail:
            raise ValueError(
                "config: that kernel is not here, or not for codes of 8 bits or latents"
            )
        hopper.launch(q, k, v, batch, tiles, out, rules)
        return
    page = k.shape[2]
    if page % config.tile:
        raise ValueError(f"config: a tile of {config.tile} keys does not divide a page of {page}")
    codes = kv_fp8.decoder_for(exponents, q.device)
    tile = (config.tile, config.stages)
    heads = (h, k.shape[1], d, page)
    shape = AttentionShape(*heads, *tile, rules.window, rules.soft_cap, codes, tail)
    scale = rules.scale_for(width) * LOG2E.value
    launch_kernel(
        _prefill_kernel,
        (tiles.shape[0], h),
        *(q, Cache.of(k, v, exponents), out, tiles, batch, tensor_or(rules.sinks, q), scale),
        *(batch.tables.shape[1], shape, config.rows, rules.sinks is not None),
        num_warps=config.warps,
    )
