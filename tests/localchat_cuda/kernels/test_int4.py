from dataclasses import replace
from typing import get_args

import pytest
import torch

from localchat_cuda.kernels import int4
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import gemm_dequant as w4_dequant
from localchat_cuda.kernels.int4 import gemm_few as w4_few
from localchat_cuda.kernels.int4 import gemm_tiled as w4_tiled
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.kernels.int4.activations import HalfRows, Int8Rows
from localchat_cuda.kernels.int4.pack import BLOCK_K, GROUPS
from localchat_cuda.kernels.int4.row_norm import RowNorm
from localchat_cuda.kernels.int4.tile_config import (
    GemmVariant,
    TileConfig,
    tile_config_for,
    variant_for,
)
from tests.support import int4_reference
from tests.support.awq import to_awq
from tests.support.int4_activations import compare_prepare
from tests.support.int4_weights import relative, values, weight
from tests.support.seeded import seeded
from tests.support.tiny_engine_core import DEVICE


@pytest.mark.parametrize("group", GROUPS)
def test_unpack_inverts_pack(group: int) -> None:
    codes = torch.randint(0, 16, (48, 640))
    groups = 640 // group
    scales, zeros = torch.rand(48, groups).half(), torch.randint(0, 16, (48, groups))
    packed = w4_pack.pack(codes, scales, zeros)
    found = w4_pack.unpack(packed)
    assert packed.group == group
    assert packed.scale_zeros.shape == w4_pack.side_shape(48, 640, group)
    assert torch.equal(found[0], codes.to(torch.uint8))
    assert torch.equal(found[1], scales)
    assert torch.equal(found[2], zeros.half())


@pytest.mark.parametrize(("group", "words"), [(128, 5), (64, 5 + 2), (32, 10 + 3)])
def test_scales_and_zeros_of_small_groups_take_less_than_a_word_each(
    group: int, words: int
) -> None:
    """Five column blocks: two scales a word, and eight zeros."""
    assert weight(16, 640, group=group).scale_zeros.numel() == 16 * words


@pytest.mark.parametrize("group", GROUPS)
def test_repacked_awq_layer_keeps_its_values(group: int) -> None:
    codes, scales, zeros = (
        torch.randint(0, 16, (32, 256)),
        torch.rand(32, 256 // group).half(),
        torch.randint(0, 16, (32, 256 // group)),
    )
    qweight, qzeros, awq_scales = to_awq(codes, scales, zeros)
    assert qweight.shape == (256, 4)
    # the layout as AutoAWQ documents it: nibble i of a word holds column (0, 2, 4, 6, 1, 3, 5,
    # 7)[i]
    assert int(qweight[5, 2] >> 4) & 15 == int(codes[16 + 2, 5])
    packed = w4_pack.from_awq(qweight, qzeros, awq_scales)
    spread = codes - zeros.repeat_interleave(group, 1)
    wanted = spread * scales.float().repeat_interleave(group, 1)
    assert torch.equal(w4_pack.dense(packed), wanted)


@pytest.mark.parametrize("group", GROUPS)
def test_rows_sorted_reorders_the_dense_rows(group: int) -> None:
    w, rows = (
        weight(64, 384, group=group),
        torch.randperm(64, generator=seeded(4)),
    )
    assert torch.equal(w4_pack.dense(w4_pack.rows_sorted(w, rows)), w4_pack.dense(w)[rows])


def test_prepare_with_an_order_equals_prepare_of_ordered_columns() -> None:
    order = torch.randperm(256, generator=seeded(6)).int()
    x = values(3, 256)
    held = [HalfRows.empty(3, 256, DEVICE) for _ in range(2)]
    w4_activations.prepare("plain", x[None], held[0], order=order)
    w4_activations.prepare("plain", x[:, order.long()][None].contiguous(), held[1])
    assert torch.equal(held[0].x, held[1].x)
    assert torch.equal(held[0].factors, held[1].factors)
    with pytest.raises(ValueError, match="order"):
        w4_activations.prepare("plain", x[None], held[0], order=order[:128])


def test_pack_refuses_shapes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="codes"):
        w4_pack.pack(torch.zeros(24, 128), torch.zeros(24, 1), torch.zeros(24, 1))
    with pytest.raises(ValueError, match="AWQ layer"):
        w4_pack.from_awq(
            torch.zeros(128, 4, dtype=torch.int32),
            torch.zeros(8, 4, dtype=torch.int32),
            torch.zeros(8, 32),
        )
    with pytest.raises(ValueError, match="scales and zeros: one for each 32, 64 or 128"):
        w4_pack.pack(torch.zeros(16, 128), torch.zeros(16, 8), torch.zeros(16, 8))


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (1, TileConfig(1, 1, 1, 1)),
        (3, TileConfig(1, 4, 1, 1)),
        (4, TileConfig(2, 2, 1, 2)),
        (4, TileConfig(1, 1, 2, 2)),
        (5, TileConfig(1, 4, 1, 1)),
        (5, TileConfig(1, 1, 2, 2)),
        (8, TileConfig(2, 2, 1, 2)),
    ],
)
@pytest.mark.parametrize("group", GROUPS)
def test_int8_gemm_matches_the_reference(rows: int, shape: TileConfig, group: int) -> None:
    w = weight(32, 640 if shape.warps == 1 else 512, group=group)
    x = values(rows, w.features_in)
    held = Int8Rows.empty(rows, w.features_in, DEVICE, group)
    int4_reference.quantize(x, held)
    out = torch.full((shape.splits, rows, 32), float("nan"))
    w4_few.gemm(held, w, out, shape)
    assert relative(out.sum(0), int4_reference.gemm_int8(held, w, None)) < 1e-5
    assert relative(out.sum(0), x @ w4_pack.dense(w).t()) < 1e-4


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (1, TileConfig(2, 2, 1, 2)),
        (9, TileConfig(1, 1, 2, 2)),
        (16, TileConfig(1, 1, 1, 1)),
        (16, TileConfig(2, 2, 1, 2)),
    ],
)
@pytest.mark.parametrize("group", GROUPS)
def test_fp16_gemm_matches_the_reference(rows: int, shape: TileConfig, group: int) -> None:
    w = weight(32, 640 if shape.warps == 1 else 512, group=group)
    x = values(rows, w.features_in)
    held = HalfRows.empty(rows, w.features_in, DEVICE, group=group)
    int4_reference.quantize(x, held)
    out = torch.full((shape.splits, rows, 32), float("nan"))
    w4_few.gemm(held, w, out, shape)
    assert relative(out.sum(0), int4_reference.gemm_fp16(held, w, None)) < 1e-4
    assert relative(out.sum(0), x @ w4_pack.dense(w).t()) < 1e-3


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("variant", ["int8", "fp16", "tiled"])
def test_every_variant_applies_the_norm_of_each_row(variant: GemmVariant, group: int) -> None:
    w, rows = weight(64, 256, group=group), 3
    x = values(rows, 256)
    squares = x.square().view(rows, 2, 128).sum(-1)
    wanted = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) @ w4_pack.dense(w).t()
    out = torch.empty(1, rows, 64)
    if variant == "int8":
        held = Int8Rows.empty(rows, 256, DEVICE, group)
        int4_reference.quantize(x, held)
        w4_few.gemm(held, w, out, TileConfig(1, 2, 1, 1), RowNorm(squares, 1e-6))
    else:
        half = HalfRows.empty(rows, 256, DEVICE, "slots" if variant == "tiled" else "lanes", group)
        int4_reference.quantize(x, half)
        if variant == "tiled":
            tiled = w4_tiled.TiledGemmConfig(TileConfig(1, 4, 2, 1), 16)
            w4_tiled.gemm(half, w, out, tiled, norm=RowNorm(squares, 1e-6))
        else:
            w4_few.gemm(half, w, out, TileConfig(1, 1, 1, 1), norm=RowNorm(squares, 1e-6))
    assert relative(out[0], wanted) < 1e-3


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize("size", [3e-3, 5e4])
def test_a_scaled_residual_is_normed_as_if_it_were_not(size: float, kernel: bool) -> None:
    w, rows, eps = weight(64, 256), 3, 1e-5
    x, gain = values(rows, 256) * size, values(1, 256)[0].clamp(-1.0, 1.0)
    held = HalfRows.empty(rows, 256, DEVICE)
    squares, residual = torch.empty(rows, 2), x.clone()
    call = w4_activations.prepare if kernel else int4_reference.prepare
    call(
        "norm", torch.zeros(1, rows, 256), held, residual=residual, weight=gain, squares=squares,
        factor=w4_activations.HALF_RESIDUAL, eps=eps,
    )  # fmt: skip
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain
    found = int4_reference.gemm_fp16(held, w, RowNorm(squares, eps))
    assert torch.equal(residual, x)
    assert relative(found, wanted @ w4_pack.dense(w).t()) < 2e-3


@pytest.mark.parametrize("group", GROUPS)
def test_int8_gemm_with_an_outlier_keeps_the_precision_of_its_block(group: int) -> None:
    w = weight(16, 256, group=group)
    x = values(1, 256)
    x[0, 7] = 300.0
    held = Int8Rows.empty(1, 256, DEVICE, group)
    int4_reference.quantize(x, held)
    out = torch.empty(1, 1, 16)
    w4_few.gemm(held, w, out, TileConfig(1, 1, 1, 1))
    assert relative(out[0], x @ w4_pack.dense(w).t()) < 2e-4


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dequantize_matches_the_dense_weight(dtype: torch.dtype, group: int) -> None:
    w = weight(64, 640, group=group)
    out = torch.full((64, 640), float("nan"), dtype=dtype)
    w4_dequant.dequantize(w, out)
    # Triton's interpreter truncates to bf16 where a GPU rounds: one unit in the last place
    rtol = 0.0 if dtype == torch.float16 else 2.0**-7
    assert torch.allclose(out.float(), w4_pack.dense(w).to(dtype).float(), rtol=rtol, atol=0.0)


def test_dequant_gemm_computes_every_column() -> None:
    w, x = weight(80, 256), values(5, 256).half()
    out = torch.full((5, 80), float("nan"), dtype=torch.float16)
    w4_dequant.gemm(x, w, out)
    assert relative(out.float(), x.float() @ w4_pack.dense(w).t()) < 2e-3


@pytest.mark.parametrize("mode", ["embed", "norm", "act_and_mul", "plain"])
@pytest.mark.parametrize(
    ("kind", "rows", "ordered"),
    [
        *(("int8", 1, False), ("int8", 5, True)),
        *(("lanes", 5, False), ("lanes", 2, True)),
        *(("slots", 1, False), ("slots", 45, True)),
    ],
)
def test_prepare_matches_the_reference(
    mode: w4_activations.Mode, kind: str, rows: int, ordered: bool
) -> None:
    """One row count of every format with and without an order; the other combinations: test_int4_gpu.py."""
    compare_prepare(mode, kind, rows, ordered, DEVICE)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(
    ("kind", "rows", "ordered"), [("int8", 5, True), ("lanes", 2, False), ("slots", 45, True)]
)
def test_prepare_for_small_groups_matches_the_reference(
    kind: str, rows: int, ordered: bool, group: int
) -> None:
    compare_prepare("norm", kind, rows, ordered, DEVICE, group)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("order", ["lanes", "slots"])
def test_natural_order_inverts_ordered(order: w4_activations.Order, group: int) -> None:
    x = torch.arange(512.0).view(2, 256)
    assert torch.equal(
        int4_reference.natural_order(int4_reference.ordered(x, order, group), order, group), x
    )


def test_rows_for_other_groups_are_refused() -> None:
    w = weight(64, 256, group=32)
    with pytest.raises(ValueError, match="groups of 32 wanted, 64 given"):
        int4.gemm(int4.empty_activations(1, 256, DEVICE, 64), w)
    lanes, slots = (
        HalfRows.empty(9, 256, DEVICE, order) for order in get_args(w4_activations.Order)
    )
    out = torch.empty(1, 9, 64)
    with pytest.raises(ValueError, match="groups of 32 wanted, 128 given"):
        w4_few.gemm(lanes, w, out, TileConfig(1, 1, 1, 1))
    tiled = w4_tiled.TiledGemmConfig(TileConfig(1, 4, 2, 1), 16)
    with pytest.raises(ValueError, match="groups of 32 wanted, 128 given"):
        w4_tiled.gemm(slots, w, out, tiled)


@pytest.mark.parametrize("mode", ["embed", "norm", "act_and_mul"])
def test_prepare_with_several_rows_per_program_writes_no_row_past_the_last(
    mode: w4_activations.Mode,
) -> None:
    """Programs take several rows each; rows past those of the step are not theirs to write."""
    rows, more, k = 45, 64, 256
    source = values(50, k) if mode == "embed" else values(rows, 2 * k)[None]
    source = source[:, :, :k].contiguous() if mode == "norm" else source
    half = torch.full((more, k), 7.0, dtype=torch.float16)
    factors = torch.full((2, k // BLOCK_K, more), 7.0)
    residual, squares = torch.full((more, k), 7.0), torch.full((more, k // BLOCK_K), 7.0)
    w4_activations.prepare(
        mode, source, HalfRows(half[:rows], factors, "slots"),
        ids=torch.arange(rows) if mode == "embed" else None, residual=residual[:rows],
        weight=values(1, k)[0], squares=squares[:rows],
    )  # fmt: skip
    for held in (half, residual, squares, factors.permute(2, 0, 1)):
        assert bool((held[rows:] == 7).all())
    assert bool((half[:rows] != 7).any(1).all())


@pytest.mark.parametrize(
    ("n", "k"), [(1152, 896), (896, 4864), (6144, 4096), (28672, 4096), (4096, 14336), (64, 128)]
)
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_tile_config_exists_for_every_shape(n: int, k: int, rows: int) -> None:
    variant = variant_for(rows)
    tile_config_for(variant, rows, n, k, 132).check(n, k)


def test_variant_follows_the_row_count() -> None:
    rows = (1, 8, 9, 16, 17, 32, 33, 1024, 1025)
    wanted = ["int8"] * 2 + ["fp16"] * 2 + ["tiled"] * 4 + ["dequant"]
    assert [variant_for(m) for m in rows] == wanted
    with pytest.raises(ValueError, match="more than the int8 variant takes"):
        tile_config_for("int8", 9, 64, 128, 132)


def test_row_class_shares_one_tile_config() -> None:
    for rows in (1, 2, 3):
        assert tile_config_for("int8", rows, 4608, 3584, 132) == tile_config_for(
            "int8", 4, 4608, 3584, 132
        )


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(("variant", "rows"), [("int8", 1), ("int8", 8), ("fp16", 16)])
def test_smaller_groups_have_configs_that_compile_soon(
    variant: GemmVariant, rows: int, group: int
) -> None:
    """What was measured for groups of 128 takes minutes there."""
    for n, k in ((37888, 3584), (3584, 18944), (4608, 3584), (3584, 3584)):
        config = tile_config_for(variant, rows, n, k, 132, group)
        config.check(n, k)
        assert config.blocks <= 2 and config.depth == 1


def test_wrong_arguments_raise_with_their_name() -> None:
    w = weight(32, 256)
    held = Int8Rows.empty(1, 256, DEVICE)
    with pytest.raises(ValueError, match="out"):
        w4_few.gemm(held, w, torch.empty(2, 1, 32), TileConfig(1, 1, 1, 1))
    with pytest.raises(ValueError, match="factors"):
        w4_few.gemm(
            replace(held, factors=held.factors[:1]),
            w,
            torch.empty(1, 1, 32),
            TileConfig(1, 1, 1, 1),
        )
    with pytest.raises(ValueError, match="shape"):
        w4_few.gemm(held, w, torch.empty(3, 1, 32), TileConfig(1, 1, 1, 3))


@pytest.mark.parametrize(
    ("rows", "tile", "shape"),
    [
        (1, 16, TileConfig(2, 4, 2, 3)),
        (17, 16, TileConfig(1, 4, 2, 1)),
        (33, 32, TileConfig(1, 4, 2, 1)),
        (65, 32, TileConfig(2, 4, 4, 3)),
        (40, 64, TileConfig(2, 4, 2, 3)),
    ],
)
@pytest.mark.parametrize("group", GROUPS)
def test_tiled_gemm_matches_the_fp16_reference(
    rows: int, tile: int, shape: TileConfig, group: int
) -> None:
    w = weight(128, 384, group=group)
    x = values(rows, w.features_in)
    held = HalfRows.empty(rows, w.features_in, DEVICE, "slots", group)
    int4_reference.quantize(x, held)
    out = torch.full((shape.splits, rows, 128), float("nan"))
    squares = x.square().view(rows, 3, 128).sum(-1)
    w4_tiled.gemm(held, w, out, w4_tiled.TiledGemmConfig(shape, tile), norm=RowNorm(squares, 1e-6))
    assert relative(out.sum(0), int4_reference.gemm_fp16(held, w, RowNorm(squares, 1e-6))) < 1e-3


def test_tiled_rule_divides_every_shape() -> None:
    for n, k in ((1152, 896), (896, 4864), (37888, 3584), (3584, 18944), (4608, 3584), (64, 128)):
        for rows in (17, 32, 128, 512):
            w4_tiled.tile_config_for(rows, n, k, 132).shape.check(n, k, wide=True)


@pytest.mark.parametrize(
    ("rows", "tile", "warps", "gelu", "group", "into"),
    [
        *((70, 64, 4, gelu, 128, 128) for gelu in (False, True)),
        *((33, 64, 8, gelu, 128, 128) for gelu in (False, True)),
        *((140, 128, 4, gelu, 128, 32) for gelu in (False, True)),
        (70, 64, 4, False, 32, 32),
        (33, 64, 8, True, 64, 64),
        (33, 64, 8, False, 32, 64),
    ],
)
def test_fused_gemm_applies_act_and_mul(
    rows: int, tile: int, warps: int, gelu: bool, group: int, into: int
) -> None:
    """into: the group of the weight that reads the result."""
    w = weight(512, 384, group=group)
    x = values(rows, w.features_in) / 30
    held = HalfRows.empty(rows, w.features_in, DEVICE, "slots", group)
    int4_reference.quantize(x, held)
    squares = x.square().view(rows, 3, 128).sum(-1)
    found, wanted = (HalfRows.empty(rows, 256, DEVICE, "slots", into) for _ in range(2))
    found.x.fill_(float("nan"))
    config = w4_tiled.TiledGemmConfig(TileConfig(2, warps, 3, 1), tile)
    w4_tiled.gemm(held, w, found, config, norm=RowNorm(squares, 0.5), gelu=gelu)
    sums = int4_reference.gemm_fp16(held, w, RowNorm(squares, 0.5))[None]
    int4_reference.prepare("act_and_mul", sums, wanted, gelu=gelu)
    assert relative(found.x.float(), wanted.x.float()) < 1e-3


def test_fused_gemm_refuses_unsupported_configs() -> None:
    w = weight(128, 256)
    held, into = (HalfRows.empty(40, k, DEVICE, "slots") for k in (256, 64))
    with pytest.raises(ValueError, match="two blocks and one split of 128 features"):
        w4_tiled.gemm(held, w, into, w4_tiled.TiledGemmConfig(TileConfig(1, 4, 3, 1), 64))
    square = weight(512, 256)
    with pytest.raises(ValueError, match="out: memory of its own"):
        w4_tiled.gemm(held, square, held, w4_tiled.TiledGemmConfig(TileConfig(2, 4, 3, 1), 64))
    lanes = HalfRows.empty(40, 64, DEVICE, "lanes")
    with pytest.raises(ValueError, match="out: slot order wanted"):
        w4_tiled.gemm(held, w, lanes, w4_tiled.TiledGemmConfig(TileConfig(2, 4, 3, 1), 64))


@pytest.mark.parametrize("rows", [3, 12, 20])
def test_output_features_in_16s_are_multiplied_in_any_number_of_rows(rows: int) -> None:
    """Kernels for more than 16 rows take them in 64s."""
    w, x = weight(80, 256), values(rows, 256).half()
    assert int4.rows_for(w, 512) == 16
    found = int4.gemm_of(x, w).float().sum(0)
    assert relative(found, x.float() @ w4_pack.dense(w).t()) < 2e-3
