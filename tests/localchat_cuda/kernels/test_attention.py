from dataclasses import replace

import pytest
import torch

from localchat_cuda.config.rope import Rotation
from localchat_cuda.kernels import activation, rms_norm, rope
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import prefill as prefill_attention
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.attention.decode import Partials
from localchat_cuda.kernels.attention.reference import AttentionBatch, Rules
from localchat_cuda.kernels.int4 import activations as w4_activations
from tests.support import int4_reference
from tests.support.attention_scenes import PAGE, close, numbers, scene
from tests.support.seeded import seeded
from tests.support.tiny_engine_core import DEVICE


@pytest.mark.parametrize(
    ("length", "splits"), [(1, 3), (63, 1), (64, 1), (64, 3), (65, 1), (65, 3), (200, 3)]
)
def test_decode_matches_the_reference_at_page_borders(length: int, splits: int) -> None:
    q, k, v, batch = scene([(1, length), (1, 5)], 6, 2, 64)
    partials = Partials.empty(splits, 2, 6, 64, q.device)
    out = torch.full((2, 384), float("nan"))
    decode_attention.attend(q, k, v, batch, 1, partials)
    decode_attention.merge(partials, out)
    close(out, attention_reference.reference(q, k, v, batch, Rules()).view(2, -1))


@pytest.mark.parametrize(
    ("h", "j", "d"), [(2, 2, 96), (3, 1, 128), (2, 1, 256), (2, 1, 512), (7, 1, 64)]
)
def test_decode_of_several_tokens_matches_the_reference(h: int, j: int, d: int) -> None:
    work = [(3, 70), (16, 16), (1, 130)]
    q, k, v, batch = scene(work, h, j, d)
    partials = Partials.empty(2, 20, h, d, q.device)
    out = torch.full((20, h * d), float("nan"), dtype=torch.float16)
    decode_attention.attend(q, k, v, batch, 16, partials)
    decode_attention.merge(partials, out)
    close(out, attention_reference.reference(q, k, v, batch, Rules()).view(20, -1))


@pytest.mark.parametrize(
    "rules",
    [
        *(Rules(window=50), Rules(soft_cap=5.0), Rules(scale=0.3)),
        Rules(window=50, sinks=torch.tensor([2.0, -1.0])),
        Rules(sinks=torch.tensor([60.0, 4.0])),
    ],
)
@pytest.mark.parametrize("prefill", [False, True])
def test_windows_soft_caps_and_scales_match_the_reference(rules: Rules, prefill: bool) -> None:
    work = [(9, 150)]
    q, k, v, batch = scene(work, 2, 1, 64)
    if rules.sinks is not None:
        rules = replace(rules, sinks=rules.sinks.to(q.device))
    wanted = attention_reference.reference(q, k, v, batch, rules)
    if prefill:
        out = torch.zeros_like(q)
        tiles = torch.tensor(prefill_attention.tiles_of([9], [150], 128), dtype=torch.int32)
        prefill_attention.attend(q, k, v, batch, tiles, out, rules)
        close(out, wanted)
    else:
        partials = Partials.empty(2, 9, 2, 64, q.device)
        flat = torch.empty(9, 128)
        decode_attention.attend(q, k, v, batch, 9, partials, rules)
        decode_attention.merge(partials, flat, sinks=rules.sinks)
        close(flat, wanted.view(9, -1))


def test_merged_heads_of_128_columns_have_their_sinks() -> None:
    q, k, v, batch = scene([(1, 100)], 2, 1, 128)
    rules = Rules(sinks=torch.tensor([3.0, -1.0]))
    partials, out = Partials.empty(2, 1, 2, 128, q.device), torch.empty(1, 256)
    decode_attention.attend(q, k, v, batch, 1, partials, rules)
    decode_attention.merge(partials, out, sinks=rules.sinks)
    close(out, attention_reference.reference(q, k, v, batch, rules).view(1, -1))


@pytest.mark.parametrize(
    ("window", "d"), [(1, 64), (50, 256), (64, 64), (65, 64), (128, 64), (150, 64), (500, 64)]
)
def test_prefill_with_a_window_reads_no_page_before_it(window: int, d: int) -> None:
    work = [(70, 300), (65, 65), (1, 200)]
    q, k, v, batch = scene(work, 1, 1, d)
    wanted = attention_reference.reference(q, k, v, batch, Rules(window=window))
    config = prefill_attention.tile_config_for(d)
    forget(batch, k, work, window, config.tile)
    tiles = prefill_attention.tiles_of([c for c, _ in work], [n for _, n in work], config.rows)
    out = torch.full_like(q, float("nan"))
    listed = torch.tensor(tiles, dtype=torch.int32)
    prefill_attention.attend(q, k, v, batch, listed, out, Rules(window=window))
    close(out, wanted)


@pytest.mark.parametrize(("window", "splits"), [(1, 4), (64, 1), (65, 4), (130, 4), (500, 1)])
def test_decode_with_a_window_reads_no_page_before_it(window: int, splits: int) -> None:
    work = [(1, 300), (5, 200), (1, 3)]
    q, k, v, batch = scene(work, 2, 1, 64)
    rules = Rules(window=window, scale=0.2)
    wanted = attention_reference.reference(q, k, v, batch, rules)
    forget(batch, k, work, window, decode_attention.tile_config_for(64, 16).tile)
    partials = Partials.empty(splits, 7, 2, 64, q.device)
    out = torch.full((7, 128), float("nan"))
    decode_attention.attend(q, k, v, batch, 5, partials, rules)
    decode_attention.merge(partials, out)
    close(out, wanted.view(7, -1))


@pytest.mark.parametrize("work", [[(1, 130), (1, 64)], [(9, 70)]])
def test_wide_heads_have_tiles_for_much_shared_memory(work: list[tuple[int, int]]) -> None:
    q, k, v, batch = scene(work, 8, 2, 256)
    rules, widest = Rules(), max(count for count, _ in work)
    rows = 16 if widest == 1 else 64
    config = decode_attention.tile_config_for(256, rows, roomy=True)
    assert config != decode_attention.tile_config_for(256, rows)
    partials = Partials.empty(3, len(q), 8, 256, q.device)
    out = torch.full((len(q), 2048), float("nan"))
    decode_attention.attend(q, k, v, batch, widest, partials, rules, config=config)
    decode_attention.merge(partials, out)
    close(out, attention_reference.reference(q, k, v, batch, rules).view(len(q), -1))


def forget(
    batch: AttentionBatch, k: torch.Tensor, work: list[tuple[int, int]], window: int, tile: int
) -> None:
    """Point whole pages before every window at pages of NaN, so that reading them spoils the result."""
    for i, (count, length) in enumerate(work):
        oldest = max(length - count - window + 1, 0) // tile * tile
        batch.tables[i + 1, : oldest // PAGE] = k.shape[0] - 1


@pytest.mark.parametrize(
    ("h", "j", "d"), [(4, 2, 64), (2, 1, 96), (2, 1, 128), (1, 1, 256), (2, 1, 512)]
)
def test_prefill_matches_the_reference(h: int, j: int, d: int) -> None:
    work = [(65, 65), (40, 167), (1, 64)]
    q, k, v, batch = scene(work, h, j, d)
    rows = prefill_attention.tile_config_for(d).rows
    tiles = prefill_attention.tiles_of([c for c, _ in work], [n for _, n in work], rows)
    out = torch.full_like(q, float("nan"))
    prefill_attention.attend(q, k, v, batch, torch.tensor(tiles, dtype=torch.int32), out)
    close(out, attention_reference.reference(q, k, v, batch, Rules()))


def test_tiles_cover_every_new_token_longest_history_first() -> None:
    tiles = prefill_attention.tiles_of([5, 1, 4], [5, 100, 10], 2)
    assert sorted(tiles) == [(0, 0), (0, 2), (0, 4), (1, 0), (2, 0), (2, 2)]
    assert tiles[0] == (1, 0)
    assert tiles[-1] == (0, 0)


@pytest.mark.parametrize(("h", "d", "ordered"), [(4, 96, False), (4, 96, True), (3, 128, True)])
def test_merge_writes_the_activations_of_the_next_gemm(h: int, d: int, ordered: bool) -> None:
    q, k, v, batch = scene([(1, 100)], h, 1, d)
    partials = Partials.empty(2, 1, h, d, q.device)
    decode_attention.attend(q, k, v, batch, 1, partials)
    flat = torch.empty(1, 384)
    decode_attention.merge(partials, flat)
    order = torch.randperm(384, generator=seeded(5)) if ordered else None
    if order is not None:
        flat = flat[:, order]
    for found, wanted in (
        (
            w4_activations.Int8Rows.empty(1, 384, q.device),
            w4_activations.Int8Rows.empty(1, 384, q.device),
        ),
        (
            w4_activations.HalfRows.empty(1, 384, q.device),
            w4_activations.HalfRows.empty(1, 384, q.device),
        ),
    ):
        decode_attention.merge(partials, found, order=None if order is None else order.int())
        int4_reference.quantize(flat, wanted)
        assert float((found.x.float() - wanted.x.float()).abs().max()) <= 1.0
        assert torch.allclose(found.factors, wanted.factors, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("h", "j", "d", "splits", "extras", "turning"),
    [
        (3, 1, 64, 1, False, 0),
        (3, 1, 64, 3, True, 0),
        (2, 2, 96, 3, False, 0),
        (2, 1, 128, 1, True, 96),
        (2, 1, 256, 1, True, 0),
        (1, 1, 96, 1, False, 24),
    ],
)
def test_rope_store_matches_the_reference(
    h: int, j: int, d: int, splits: int, extras: bool, turning: int
) -> None:
    t, columns = 3, (h + 2 * j) * d
    qkv = numbers(splits, t, columns)
    radians = Rotation(10000.0, None, turning).radians(d, 300)
    table = rope.angle_table(300, d, radians, DEVICE)
    positions = torch.tensor([0, 63, 64], dtype=torch.int32)
    slots = torch.tensor([1, 0, 1], dtype=torch.int32)
    tables = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    bias = numbers(columns) if extras else None
    norms = {"q_norm": numbers(d), "k_norm": numbers(d, seed=1)} if extras else {}
    found = []
    for call in (rope.rope_store, rope.reference):
        pool = torch.zeros(4, 2, j, PAGE, d, dtype=torch.float16)
        q = torch.full((t, h, d), float("nan"), dtype=torch.float16)
        call(
            qkv,
            table,
            positions,
            slots,
            tables,
            q,
            pool[:, 0],
            pool[:, 1],
            bias=bias,
            q_norm=norms.get("q_norm"),
            k_norm=norms.get("k_norm"),
            columns=turning,
        )
        found += [q, pool]
    assert torch.allclose(found[0].float(), found[2].float(), rtol=2e-3, atol=2e-3)
    assert torch.allclose(found[1].float(), found[3].float(), rtol=2e-3, atol=2e-3)
    assert int((found[1] != 0).any(-1).sum()) == 2 * j * t


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_rope_store_norms_values_and_takes_keys_for_them(stored: int) -> None:
    """Of a layer without values of its own, and of one that stores nothing."""
    h, j, d, t = 4, 2, 64, 3
    qkv, table = numbers(2, t, (h + stored * j) * d), rope.angles(300, d, 1e4, DEVICE)
    positions, slots = (torch.tensor(each, dtype=torch.int32) for each in ([0, 63, 64], [1, 0, 1]))
    tables = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    found = []
    for call in (rope.rope_store, rope.reference):
        pool, q = torch.zeros(4, 2, j, PAGE, d), torch.full((t, h, d), float("nan"))
        call(
            qkv, table, positions, slots, tables, q, pool[:, 0], pool[:, 1], q_norm=numbers(d),
            k_norm=numbers(d, seed=1), v_norm=True,
        )  # fmt: skip
        found.append((q, pool))
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)
    values = found[0][1][:, 1]
    there = values[(values != 0).any(-1)]
    assert len(there) == (j * t if stored else 0)
    assert torch.allclose(there.square().mean(-1), torch.ones(len(there)), atol=1e-4)
    if stored == 1:
        first = qkv.sum(0)[0, h * d : (h + 1) * d]
        wanted = first * torch.rsqrt(first.square().mean() + 1e-6)
        assert torch.allclose(values[0, 0, 0], wanted, atol=1e-5)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_add_norm_matches_the_reference(splits: int) -> None:
    y = numbers(splits, 3, 200) if splits else None
    weight = numbers(200)
    found = []
    for call in (rms_norm.add_norm, rms_norm.reference):
        residual, out = numbers(3, 200, seed=7), torch.full((3, 200), float("nan"))
        call(y, residual, weight, out, 1e-6)
        found += [residual, out]
    assert torch.allclose(found[0], found[2], atol=1e-5)
    assert torch.allclose(found[1], found[3], atol=1e-5)


@pytest.mark.parametrize(("gelu", "shape"), [(False, (2, 2600)), (True, (3, 2, 2600))])
def test_act_and_mul_matches_torch(gelu: bool, shape: tuple[int, ...]) -> None:
    x = numbers(*shape) * 4
    out = torch.empty(2, 1300)
    activation.act_and_mul(x, out, gelu=gelu)
    assert torch.allclose(out, activation.reference(x, gelu=gelu), atol=1e-5)


def test_wrong_arguments_raise_with_their_name() -> None:
    q, k, v, batch = scene([(1, 5)], 2, 1, 64)
    partials = Partials.empty(1, 1, 2, 64, q.device)
    with pytest.raises(ValueError, match="widest"):
        decode_attention.attend(q, k, v, batch, 17, partials)
    with pytest.raises(ValueError, match="v: pages"):
        decode_attention.attend(q, k, v[:, :, :32], batch, 1, partials)
    with pytest.raises(ValueError, match="q"):
        decode_attention.attend(q[:, :, :48].contiguous(), k, v, batch, 1, partials)
