"""Times decode and prefill attention with several tile configs and the default; on Hopper GPUs both
prefill kernels.
"""

from functools import partial

import torch
import triton

from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from scripts.bench.kernels.chain import Cache
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

FEW_CUTS = (
    decode_attention.DecodeTileConfig(64, 4, 3),
    decode_attention.DecodeTileConfig(64, 4, 2),
    decode_attention.DecodeTileConfig(64, 2, 3),
    decode_attention.DecodeTileConfig(64, 2, 2),
    decode_attention.DecodeTileConfig(64, 1, 2),
    decode_attention.DecodeTileConfig(32, 2, 4),
    decode_attention.DecodeTileConfig(32, 1, 3),
)


def few() -> Results:
    found: Results = {}
    work = (
        (1, 256, 1),
        (1, 7000, 1),
        (8, 256, 1),
        (8, 7000, 1),
        (32, 7000, 1),
        (128, 7000, 1),
        (1, 7000, 16),
    )
    for streams, length, new in work:
        one = streams * length * KEY_HEADS * D * 4
        count = max(1, min(40, round(FLUSH_BYTES / one)))
        caches = [Cache.make(streams, length, new) for _ in range(count)]
        q = torch.randn(streams * new, HEADS, D, device=GPU, dtype=torch.float16)
        blocks = triton.cdiv(HEADS // KEY_HEADS * new, 64)
        out = torch.full((streams * new, HEADS * D), float("nan"), device=GPU, dtype=torch.float16)
        usual = decode_attention.splits_for(streams, KEY_HEADS, blocks, length, PAGE, SMS)
        k, v = caches[0].pool[:, 0], caches[0].pool[:, 1]
        some = head_of(caches[0].batch, 8)
        wanted = attention_reference.reference(
            q[: 8 * new], k, v, some, attention_reference.Rules()
        )
        tried = []
        splits_tried = {usual, max(1, usual // 2), min(64, usual * 2)}
        for splits in sorted(splits_tried):
            partials = decode_attention.Partials.empty(splits, streams * new, HEADS, D, GPU)
            for config in FEW_CUTS:
                calls = [
                    partial(few_once, q, cache, new, partials, out, config, merged)
                    for cache in caches
                    for merged in (True,)
                ]
                out.fill_(float("nan"))
                calls[0]()
                off = error(out[: 8 * new], wanted.view(wanted.shape[0], -1))
                us = timed(calls) / len(caches)
                tried.append((us, off, splits, config))
                if splits == usual and config == decode_attention.tile_config_for(D, 16):
                    found[f"few_{streams}x{length}_new{new}_us"] = us
                    alone = [
                        partial(few_once, q, cache, new, partials, out, config, False)
                        for cache in caches
                    ]
                    unmerged = timed(alone) / len(caches)
                    print(f"  default {us:.2f} us, without merging {unmerged:.2f} us")
        tried.sort(key=lambda t: t[0])
        for us, off, splits, config in tried[:5]:
            rate = one / us / 1e6
            print(
                f"few {streams:3} x {length} new {new:2} splits {splits:2} (usual {usual}) {config}"
                f" {us:8.2f} us {rate:5.2f} TB/s err {off:.1e}",
                flush=True,
            )
        del caches, k, v
        torch.cuda.empty_cache()
    return found


def few_once(
    q: torch.Tensor,
    cache: Cache,
    new: int,
    partials: decode_attention.Partials,
    out: torch.Tensor,
    config: decode_attention.DecodeTileConfig,
    merged: bool,
) -> None:
    decode_attention.attend(
        q, cache.pool[:, 0], cache.pool[:, 1], cache.batch, new, partials, config=config
    )
    if merged:
        decode_attention.merge(partials, out)


def head_of(
    batch: attention_reference.AttentionBatch, count: int
) -> attention_reference.AttentionBatch:
    return attention_reference.AttentionBatch(
        batch.starts[:count],
        batch.counts[:count],
        batch.lengths[:count],
        batch.slots[:count],
        batch.tables,
    )


MANY_CUTS = (
    prefill_attention.PrefillTileConfig(128, 64, 8, 2),
    prefill_attention.PrefillTileConfig(128, 64, 8, 3),
    prefill_attention.PrefillTileConfig(128, 64, 8, 4),
    prefill_attention.PrefillTileConfig(128, 64, 4, 3),
    prefill_attention.PrefillTileConfig(64, 64, 4, 3),
    prefill_attention.PrefillTileConfig(64, 64, 4, 2),
    prefill_attention.HOPPER,
)


def many() -> Results:
    found: Results = {}
    for count, length in (
        (128, 128),
        (512, 512),
        (2048, 2048),
        (4096, 4096),
        (2904, 7000),
        (7000, 7000),
    ):
        cache = Cache.make(1, length, count)
        q = torch.randn(count, HEADS, D, device=GPU, dtype=torch.float16)
        out = torch.empty_like(q)
        k, v = cache.pool[:, 0], cache.pool[:, 1]
        some = attention_reference.AttentionBatch(
            cache.batch.starts + max(0, count - 256),
            cache.batch.counts.clamp(max=256),
            cache.batch.lengths,
            cache.batch.slots,
            cache.batch.tables,
        )
        wanted = attention_reference.reference(q, k, v, some, attention_reference.Rules())[-256:]
        pairs = count * (length - count) + count * (count + 1) / 2
        usual = prefill_attention.best_tile_config(D, PAGE, q.dtype, GPU)
        for config in MANY_CUTS:
            if config == prefill_attention.HOPPER != usual:
                continue
            listed = prefill_attention.tiles_of([count], [length], config.rows)
            tiles = torch.tensor(listed, dtype=torch.int32, device=GPU)
            call = partial(
                prefill_attention.attend, q, k, v, cache.batch, tiles, out, config=config
            )
            out.fill_(float("nan"))
            call()
            off = error(out[-256:], wanted)
            us = timed([call] * 4) / 4
            rate = 4 * pairs * HEADS * D / us / 1e6
            print(
                f"many {count} of {length} {config}: {us:9.1f} us {rate:6.0f} TFLOP/s err {off:.1e}",
                flush=True,
            )
            if config == usual:
                found[f"many_{count}of{length}_us"] = us
            if config == prefill_attention.tile_config_for(D) != usual:
                found[f"many_{count}of{length}_everywhere_us"] = us
        torch_q, torch_k = (
            q.transpose(0, 1)[None],
            torch.randn(1, HEADS, count, D, device=GPU).half(),
        )
        sdpa = torch.nn.functional.scaled_dot_product_attention
        us = timed([partial(sdpa, torch_q, torch_k, torch_k, is_causal=True)] * 4) / 4
        print(f"  torch's attention, {count} tokens without a past: {us:.1f} us", flush=True)
    return found
