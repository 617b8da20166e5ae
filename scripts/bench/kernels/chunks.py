"""Compares the prefill attention kernel for all devices with that for Hopper GPUs.

Over fp16 KV and over 8-bit KV, which the latter reads dequantized: times, errors against fp32, and a
window.
"""

from collections.abc import Callable
from functools import partial

import torch

from localchat_cuda.kernels.attention import kv_fp8_dequant
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.attention.prefill import HOPPER
from localchat_cuda.kernels.attention.reference import Rules
from scripts.bench.kernels.chain import Cache
from scripts.bench.kernels.coded import Coded
from scripts.bench.kernels.timing import (
    GPU,
    HEADS,
    KEY_HEADS,
    PAGE,
    D,
    Results,
    error,
    timed,
)

WORK = (
    (64, 64),
    (128, 128),
    (256, 256),
    (512, 512),
    (128, 4096),
    (64, 7000),
    (2048, 2048),
    (4096, 4096),
    (2904, 7000),
    (4096, 30000),
)
WINDOW = 1024


def chunks() -> Results:
    """Microseconds by count, length and kernel; `decode`: dequantizing alone."""
    found: Results = {}
    for count, length in WORK:
        found |= _one(count, length)
        torch.cuda.empty_cache()
    return found


def _one(count: int, length: int) -> Results:
    cache = Coded.of(Cache.make(1, length, count))
    batch = cache.plain.batch
    q = torch.randn(count, HEADS, D, device=GPU, dtype=torch.float16)
    out = torch.empty_like(q)
    k, v = cache.plain.pool.unbind(1)
    pages = -(-length // PAGE)
    sources = torch.zeros(pages, 2, dtype=torch.int32, device=GPU)
    sources[:, 1] = torch.arange(pages)
    plain = kv_fp8_dequant.DequantizedPages.empty(pages, KEY_HEADS, PAGE, D, q.dtype, batch.tables)
    decode = partial(
        kv_fp8_dequant.dequantize, cache.k, cache.v, cache.exponents, batch.tables, sources, plain
    )

    def attend(
        config: prefill_attention.PrefillTileConfig,
        rules: Rules,
        *,
        coded: bool = False,
        over: bool = False,
    ) -> None:
        keys, values = plain.pool.unbind(1) if over else (cache.k, cache.v) if coded else (k, v)
        own = plain.batch(batch) if over else batch
        exponents = cache.exponents if coded else None
        prefill_attention.attend(
            q, keys, values, own, tiles[config], out, rules, exponents=exponents, config=config
        )

    def both() -> None:
        decode()
        attend(HOPPER, Rules(), over=True)

    here = prefill_attention.tile_config_for(D)
    tiles = {
        config: torch.tensor(
            prefill_attention.tiles_of([count], [length], config.rows),
            dtype=torch.int32,
            device=GPU,
        )
        for config in (here, HOPPER)
    }
    ways: dict[str, Callable[[], None]] = {
        "everywhere": partial(attend, here, Rules()),
        "hopper": partial(attend, HOPPER, Rules()),
        "everywhere window": partial(attend, here, Rules(window=WINDOW)),
        "hopper window": partial(attend, HOPPER, Rules(window=WINDOW)),
        "everywhere 8 bits": partial(attend, here, Rules(), coded=True),
        "hopper 8 bits": both,
    }
    tail = min(count, 64)
    some = attention_reference.AttentionBatch(
        batch.starts + count - tail, batch.counts.clamp(max=tail), batch.lengths, batch.slots,
        batch.tables,
    )  # fmt: skip
    found: Results = {"decode": timed([decode] * 4) / 4}
    texts = [f"decode {found['decode']:.1f} us"]
    for name, call in ways.items():
        rules = Rules(window=WINDOW) if "window" in name else Rules()
        keys, values, exponents = k, v, None
        if "8 bits" in name:
            keys, values, exponents = cache.k, cache.v, cache.exponents
        wanted = attention_reference.reference(q, keys, values, some, rules, exponents)[-tail:]
        out.fill_(float("nan"))
        call()
        off = error(out[-tail:], wanted)
        found[name] = timed([call] * 4) / 4
        texts.append(f"{name} {found[name]:.1f} us ({off:.0e})")
    print(f"{count} of {length}: {', '.join(texts)}", flush=True)
    return {f"{count}of{length} {name}": us for name, us in found.items()}
