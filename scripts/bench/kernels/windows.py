"""Checks and times windows, soft caps, heads of 256 columns, partial rotations and post-norms.

Times are for several tile configs.
"""

from functools import partial

import torch
import triton

from localchat_cuda.config.rope import Rotation
from localchat_cuda.kernels import activation, rms_norm, rms_norm_post, rope
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import tile_config as w4_tile_config
from scripts.bench.kernels.awkward import scene
from scripts.bench.kernels.timing import EPS, GPU, PAGE, SMS, Results, error, rows_for, timed
from tests.support import int4_reference

GEMMA, MISTRAL = (16, 8, 256, 1024), (32, 8, 128, 4096)
"""Query heads, key heads, columns of a head, window: Gemma 3 12B and the first Mistral 7B."""
MANY_CUTS = (
    prefill_attention.PrefillTileConfig(64, 32, 8, 2),
    prefill_attention.PrefillTileConfig(64, 32, 4, 2),
    prefill_attention.PrefillTileConfig(64, 32, 8, 3),
    prefill_attention.PrefillTileConfig(64, 64, 8, 2),
    prefill_attention.PrefillTileConfig(128, 32, 8, 2),
    prefill_attention.PrefillTileConfig(128, 32, 8, 3),
    prefill_attention.PrefillTileConfig(128, 64, 8, 2),
)
FEW_CUTS = (
    decode_attention.DecodeTileConfig(32, 4, 2),
    decode_attention.DecodeTileConfig(32, 4, 3),
    decode_attention.DecodeTileConfig(32, 2, 3),
    decode_attention.DecodeTileConfig(64, 4, 2),
    decode_attention.DecodeTileConfig(64, 8, 2),
)
HIDDEN = 3840


def windows() -> Results:
    """Run all of it, one after the other."""
    found = checks()
    for name, shape in (("gemma", GEMMA), ("mistral", MISTRAL)):
        found |= prompts(name, shape)
        found |= decoding(name, shape)
    return found | norms()


def checks() -> Results:
    """Errors against fp32; also at the borders of tiles."""
    found: Results = {}
    work = ((65, 300), (40, 167), (1, 1), (300, 555))
    for d, dtype in ((128, torch.float16), (256, torch.bfloat16)):
        pool, batch = scene(work, 2, d, dtype)
        k, v = pool[:, 0], pool[:, 1]
        q = torch.randn(sum(c for c, _ in work), 8, d, device=GPU).to(dtype)
        listed = tiles_of(work, prefill_attention.tile_config_for(d).rows)
        for window, cap in ((1, 0.0), (64, 0.0), (65, 30.0), (150, 0.0), (0, 30.0)):
            rules = attention_reference.Rules(scale=0.1, window=window, soft_cap=cap)
            out = torch.full_like(q, float("nan"))
            prefill_attention.attend(q, k, v, batch, listed, out, rules)
            off = error(out, attention_reference.reference(q, k, v, batch, rules))
            found[f"many_d{d}_window{window}_cap{cap:.0f}"] = off
    q, table = torch.randn(1, 70, 6 * 128, device=GPU), Rotation(1e4, None, 96).radians(128, 300)
    angles = rope.angle_table(300, 128, table, GPU, 1.2)
    at = torch.arange(70, dtype=torch.int32, device=GPU)
    places = torch.zeros_like(at), torch.tensor([[1, 0]], dtype=torch.int32, device=GPU)
    both = []
    for call in (rope.rope_store, rope.reference):
        pool = torch.zeros(2, 2, 1, PAGE, 128, device=GPU, dtype=torch.float16)
        out = torch.empty(70, 4, 128, device=GPU, dtype=torch.float16)
        call(q, angles, at, *places, out, pool[:, 0], pool[:, 1], columns=96)
        both.append(torch.cat((out.flatten(), pool.flatten())))
    found["rope_96_of_128"] = error(both[0], both[1].float())
    for name, off in found.items():
        print(f"windows {name}: error {off:.1e}", flush=True)
    return found


def tiles_of(work: tuple[tuple[int, int], ...], rows: int) -> torch.Tensor:
    listed = prefill_attention.tiles_of([c for c, _ in work], [n for _, n in work], rows)
    return torch.tensor(listed, dtype=torch.int32, device=GPU)


def prompts(name: str, shape: tuple[int, int, int, int]) -> Results:
    """A chunk of 2,048 tokens that ends at 8,192, with the window and without."""
    h, j, d, window = shape
    work, found = ((2048, 8192),), Results()
    pool, batch = scene(work, j, d, torch.bfloat16)
    q = torch.randn(2048, h, d, device=GPU).bfloat16()
    out = torch.empty_like(q)
    for width in (window, 0):
        rules = attention_reference.Rules(window=width)
        for config in (
            MANY_CUTS if d == 256 else (prefill_attention.tile_config_for(d), *MANY_CUTS[3:])
        ):
            listed = tiles_of(work, config.rows)
            call = partial(
                prefill_attention.attend,
                q,
                pool[:, 0],
                pool[:, 1],
                batch,
                listed,
                out,
                rules,
                config=config,
            )
            try:
                us = timed([call] * 4) / 4
            except triton.OutOfResources as trouble:
                print(f"windows {name} {config}: {type(trouble).__name__}", flush=True)
                continue
            print(f"windows {name} prompt, window {width} {config}: {us:.0f} us", flush=True)
            if config == prefill_attention.tile_config_for(d):
                found[f"{name}_prompt_window{width}_us"] = us
    return found


def decoding(name: str, shape: tuple[int, int, int, int]) -> Results:
    """One token of 1 and of 8 sequences at 8,000."""
    h, j, d, window = shape
    found = Results()
    for streams in (1, 8):
        pool, batch = scene(((1, 8000),) * streams, j, d, torch.bfloat16)
        q = torch.randn(streams, h, d, device=GPU).bfloat16()
        splits = decode_attention.splits_for(streams, j, 1, 8000, PAGE, SMS)
        partials = decode_attention.Partials.empty(splits, streams, h, d, GPU)
        flat = torch.empty(streams, h * d, device=GPU, dtype=torch.bfloat16)
        for width in (window, 0):
            rules = attention_reference.Rules(window=width)
            wanted = attention_reference.reference(q, pool[:, 0], pool[:, 1], batch, rules)
            for config in FEW_CUTS if d == 256 else (decode_attention.tile_config_for(d, 16),):
                call = partial(once, q, pool, batch, partials, flat, rules, config)
                us, off = timed([call] * 8) / 8, error(flat, wanted.view(streams, -1))
                text = f"{us:.1f} us, error {off:.1e}"
                print(f"windows {name} x{streams}, window {width} {config}: {text}", flush=True)
                if config == decode_attention.tile_config_for(d, 16):
                    found[f"{name}_few_{streams}_window{width}_us"] = us
    return found


def once(
    q: torch.Tensor, pool: torch.Tensor, batch: attention_reference.AttentionBatch,
    partials: decode_attention.Partials,
    flat: torch.Tensor, rules: attention_reference.Rules, config: decode_attention.DecodeTileConfig,
) -> None:  # fmt: skip
    k, v = pool[:, 0], pool[:, 1]
    decode_attention.attend(q, k, v, batch, 1, partials, rules, config=config)
    decode_attention.merge(partials, flat)


def norms() -> Results:
    """Post-norms compared with plain ones, for W4 gemms and for others; GELU compared with SiLU."""
    found = Results()
    post, weight = torch.rand(2, HIDDEN, device=GPU).unbind(0)
    for m in (1, 8, 16, 32, 64):
        variant = w4_tile_config.variant_for(m)
        rows = rows_for(variant, m, HIDDEN)
        y, residual = torch.randn(8, m, HIDDEN, device=GPU), torch.randn(m, HIDDEN, device=GPU)
        squares = torch.empty(m, HIDDEN // 128, device=GPU)
        plain = partial(
            w4_activations.prepare,
            "norm",
            y,
            rows,
            residual=residual,
            weight=weight,
            squares=squares,
        )
        both = partial(rms_norm_post.prepare, y, residual, post, weight, rows, squares, EPS)
        for name, call in (("plain", plain), ("post", both)):
            found[f"feed_{name}_M{m}_us"] = us = timed([call] * 24) / 24
            print(f"windows feed {name} M={m}: {us:.2f} us", flush=True)
        residual = torch.randn(m, HIDDEN, device=GPU)
        begun, other = residual.clone(), rows_for(variant, m, HIDDEN)
        rms_norm_post.prepare(y, residual, post, weight, rows, squares, EPS)
        int4_reference.prepare_post(y, begun, post, weight, other, squares.clone(), EPS)
        found[f"feed_error_M{m}"] = error(residual, begun)
        found[f"feed_codes_M{m}"] = error(rows.x, other.x.float())
    for m in (1, 64, 2048):
        y, residual = torch.randn(1, m, HIDDEN, device=GPU), torch.randn(m, HIDDEN, device=GPU)
        out = torch.empty(m, HIDDEN, device=GPU, dtype=torch.bfloat16)
        call = partial(rms_norm.add_norm, y, residual, weight, out, EPS, post=post)
        found[f"rows_post_M{m}_us"] = timed([call] * 24) / 24
        wide = torch.randn(m, 8 * HIDDEN, device=GPU).bfloat16()
        half = torch.empty(m, 4 * HIDDEN, device=GPU, dtype=torch.bfloat16)
        for gelu in (False, True):
            us = timed([partial(activation.act_and_mul, wide, half, gelu=gelu)] * 24) / 24
            found[f"gated_{'gelu' if gelu else 'silu'}_M{m}_us"] = us
        print(f"windows rows M={m}: {found[f'rows_post_M{m}_us']:.2f} us", flush=True)
    return found
