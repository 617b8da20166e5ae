"""Compares attention over 8-bit KV with attention over fp16: tile configs, decoders, programs a
multiprocessor.

Also checks what the shapes of one model leave out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import triton

from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import kv_fp8
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from scripts.bench.kernels.awkward import FEW, HEADS_OF, MANY, scene
from scripts.bench.kernels.chain import Cache
from scripts.bench.kernels.paged import head_of
from scripts.bench.kernels.timing import (
    FLUSH_BYTES,
    GPU,
    HEADS,
    KEY_HEADS,
    PAGE,
    SMS,
    D,
    Results,
    error,
    timed,
)

WAYS = {"packed": kv_fp8.PACKED, "plain": kv_fp8.PLAIN}
WORK = ((1, 256, 1), (1, 8000, 1), (8, 8000, 1), (32, 8000, 1), (128, 8000, 1), (1, 8000, 16))
FEW_CUTS = tuple(
    decode_attention.DecodeTileConfig(64, warps, stages, small)
    for small in (False, True)  # once it is small, it stays so
    for warps in (2, 4)
    for stages in (2, 3, 4)
)
PROMPTS = ((128, 128), (2048, 2048), (2048, 8000))
MANY_CUTS = (
    prefill_attention.PrefillTileConfig(64, 64, 4, 2),
    prefill_attention.PrefillTileConfig(64, 64, 4, 3),
    prefill_attention.PrefillTileConfig(64, 64, 4, 4),
    prefill_attention.PrefillTileConfig(128, 64, 8, 2),
    prefill_attention.PrefillTileConfig(128, 64, 8, 3),
    prefill_attention.PrefillTileConfig(128, 64, 4, 3),
)


@dataclass
class Coded:
    """The 8-bit values of a cache, and the cache that they came from."""

    k: torch.Tensor
    v: torch.Tensor
    exponents: torch.Tensor
    plain: Cache

    @staticmethod
    def of(cache: Cache) -> "Coded":
        words, exponents = coded_pages(cache.pool)
        return Coded(words[:, 0], words[:, 1], exponents, cache)


def coded_pages(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and exponents of pages [pages, 2, J, P, D]; unwritten ones are NaN and spoil what reads them."""
    words, marks = kv_fp8.encode_reference(pool)
    words[pool.isnan().any(-1)] = 0x7F7F
    return words, torch.stack(marks.unbind(1), -1).contiguous()


@contextmanager
def decoding(decoder: int) -> Iterator[None]:
    """Make kernels use this decoder, whatever the card is."""
    usual = kv_fp8.decoder_of
    kv_fp8.decoder_of = lambda device: decoder
    try:
        yield
    finally:
        kv_fp8.decoder_of = usual


def coded() -> Results:
    """checked: errors against fp32; few8 (decode), many8 (prefill): us, and their share of the time
    over fp16.
    """
    found = checked()
    for streams, length, new in WORK:
        found |= _few(streams, length, new)
        torch.cuda.empty_cache()
    for count, length in PROMPTS:
        found |= _many(count, length)
        torch.cuda.empty_cache()
    return found


def checked() -> Results:
    """Check every head dimension, both halves, both decoders, awkward lengths, NaN where nothing was
    written.
    """
    found: Results = {}
    for d, (h, j) in HEADS_OF.items():
        for dtype in (torch.float16, torch.bfloat16):
            for name, decoder in WAYS.items():
                with decoding(decoder):
                    one, other = _attended(FEW, h, j, d, dtype), _attended(MANY, h, j, d, dtype)
                key = f"d{d}_{str(dtype).removeprefix('torch.')}_{name}"
                found |= {f"few8_{key}": one, f"many8_{key}": other}
                print(f"coded {key}: error of few {one:.1e}, of many {other:.1e}", flush=True)
    return found


def _attended(
    work: tuple[tuple[int, int], ...], h: int, j: int, d: int, dtype: torch.dtype
) -> float:
    pool, batch = scene(work, j, d, dtype)
    words, exponents = coded_pages(pool)
    t = sum(count for count, _ in work)
    q = torch.randn(t, h, d, device=GPU).to(dtype)
    k, v = words[:, 0], words[:, 1]
    out = torch.full((t, h, d), float("nan"), device=GPU, dtype=dtype)
    if work is FEW:
        partials = decode_attention.Partials.empty(3, t, h, d, GPU)
        decode_attention.attend(q, k, v, batch, 16, partials, exponents=exponents)
        decode_attention.merge(partials, out.view(t, h * d))
    else:
        rows = prefill_attention.tile_config_for(d).rows
        tiles = prefill_attention.tiles_of([c for c, _ in work], [n for _, n in work], rows)
        listed = torch.tensor(tiles, dtype=torch.int32, device=GPU)
        prefill_attention.attend(q, k, v, batch, listed, out, exponents=exponents)
    return error(
        out, attention_reference.reference(q, k, v, batch, attention_reference.Rules(), exponents)
    )


def _few(streams: int, length: int, new: int) -> Results:
    plain_bytes = streams * length * KEY_HEADS * D * 4
    count = max(1, min(40, round(2 * FLUSH_BYTES / plain_bytes)))
    caches = [Coded.of(Cache.make(streams, length, new)) for _ in range(count)]
    q = torch.randn(streams * new, HEADS, D, device=GPU, dtype=torch.float16)
    out = torch.full((streams * new, HEADS * D), float("nan"), device=GPU, dtype=torch.float16)
    first, rows = caches[0], min(64, max(16, 8 * new))
    some = head_of(first.plain.batch, 8)
    wanted = attention_reference.reference(
        q[: 8 * new], first.k, first.v, some, attention_reference.Rules(), first.exponents
    )

    def once(
        cache: Coded, splits: int, config: decode_attention.DecodeTileConfig, kept: bool
    ) -> None:
        k, v = (cache.k, cache.v) if kept else cache.plain.pool.unbind(1)
        exponents = cache.exponents if kept else None
        partials = decode_attention.Partials.empty(splits, streams * new, HEADS, D, GPU)
        decode_attention.attend(
            q, k, v, cache.plain.batch, new, partials, config=config, exponents=exponents
        )
        decode_attention.merge(partials, out)

    def splits_of(programs: int) -> int:
        blocks = triton.cdiv(HEADS // KEY_HEADS * new, 64)
        return decode_attention.splits_for(streams, KEY_HEADS, blocks, length, PAGE, programs * SMS)

    plain = [
        partial(once, c, splits_of(1), decode_attention.tile_config_for(D, rows), False)
        for c in caches
    ]
    plain_us = timed(plain) / count
    here = splits_of(decode_attention.programs_for(True, streams, 1))
    programs = streams * KEY_HEADS * triton.cdiv(HEADS // KEY_HEADS * new, 64) * here
    usual = decode_attention.tile_config_for(D, rows, True, programs > SMS)
    tried: list[tuple[float, float, str, int, decode_attention.DecodeTileConfig]] = []
    for name, decoder in WAYS.items():
        with decoding(decoder):
            for splits in sorted({splits_of(1), splits_of(2), splits_of(4)}):
                for config in dict.fromkeys((*FEW_CUTS, usual)):
                    calls = [partial(once, c, splits, config, True) for c in caches]
                    out.fill_(float("nan"))
                    calls[0]()
                    off = error(out[: 8 * new], wanted.view(wanted.shape[0], -1))
                    tried.append((timed(calls) / count, off, name, splits, config))
    us = next(t[0] for t in tried if t[2:] == ("packed", here, usual))
    key = f"few8_{streams}x{length}_new{new}"
    print(f"{key}: {us:.2f} us, fp16 {plain_us:.2f}: {us / plain_us:.3f}", flush=True)
    for each in sorted(tried, key=lambda t: t[0])[:4]:
        print(f"  {each[0]:8.2f} us err {each[1]:.1e} {each[2]} splits {each[3]} {each[4]}")
    worst = max(tried, key=lambda t: t[1] if t[1] == t[1] else float("inf"))
    print(f"  worst error {worst[1]:.1e}: {worst[2:]}", flush=True)
    return {f"{key}_us": us, f"{key}_of_fp16": us / plain_us, f"{key}_error": worst[1]}


def _many(count: int, length: int) -> Results:
    cache = Coded.of(Cache.make(1, length, count))
    q = torch.randn(count, HEADS, D, device=GPU, dtype=torch.float16)
    out = torch.empty_like(q)
    batch = cache.plain.batch
    some = attention_reference.AttentionBatch(
        batch.starts + max(0, count - 256), batch.counts.clamp(max=256), batch.lengths, batch.slots,
        batch.tables,
    )  # fmt: skip
    wanted = attention_reference.reference(
        q, cache.k, cache.v, some, attention_reference.Rules(), cache.exponents
    )
    found: list[tuple[float, float, str, prefill_attention.PrefillTileConfig]] = []

    def call(config: prefill_attention.PrefillTileConfig, kept: bool) -> partial[None]:
        listed = prefill_attention.tiles_of([count], [length], config.rows)
        tiles = torch.tensor(listed, dtype=torch.int32, device=GPU)
        k, v = (cache.k, cache.v) if kept else cache.plain.pool.unbind(1)
        exponents = cache.exponents if kept else None
        return partial(
            prefill_attention.attend, q, k, v, batch, tiles, out, config=config, exponents=exponents
        )

    plain_us = timed([call(prefill_attention.tile_config_for(D), False)] * 4) / 4
    for name, decoder in WAYS.items():
        with decoding(decoder):
            for config in MANY_CUTS:
                one, off = call(config, True), 0.0
                for _ in range(5):  # what is overwritten in flight is wrong now and then
                    out.fill_(float("nan"))
                    one()
                    off = max(off, error(out[-256:], wanted[-256:]))
                found.append((timed([one] * 4) / 4, off, name, config))
    usual = prefill_attention.tile_config_for(D)
    us = next(one[0] for one in found if one[2:] == ("packed", usual))
    key = f"many8_{count}of{length}"
    print(f"{key}: {us:.1f} us, fp16 {plain_us:.1f}: {us / plain_us:.3f}", flush=True)
    for each in sorted(found, key=lambda t: t[0]):
        print(f"  {each[0]:9.1f} us err {each[1]:.1e} {each[2]} {each[3]}", flush=True)
    worst = max(one[1] for one in found)
    return {f"{key}_us": us, f"{key}_of_fp16": us / plain_us, f"{key}_error": worst}
