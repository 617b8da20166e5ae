"""Weights in ggml's block formats: repacked exactly, multiplied as the reference does."""

import inspect
import re

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from localchat_cuda.ggml_forms import FORMS, GGUF_FORMS, NVFP4, packed_bytes
from localchat_cuda.kernels import ggml
from localchat_cuda.kernels.ggml import gemm_int8, gemm_tiles, tile_ops
from localchat_cuda.kernels.ggml.pack import (
    GgmlTensor,
    GgmlWeight,
    dense,
    empty,
    pack,
    pack_nvfp4,
    with_neighbours_joined,
)
from localchat_cuda.kernels.int4.activations import Int8Rows, prepare
from localchat_cuda.kernels.int4.gemm_tiled import TiledGemmConfig
from localchat_cuda.kernels.int4.row_norm import RowNorm
from localchat_cuda.kernels.int4.tile_config import TileConfig
from localchat_cuda.kernels.launch import interpreted
from localchat_cuda.weights.formats.weight import bytes_of
from tests.support import float_checkpoints, int4_reference
from tests.support.ggml_blocks import random_rows
from tests.support.seeded import seeded
from tests.support.tiny_engine_core import DEVICE

TYPES = tuple(GGUF_FORMS)
PRODUCT_TYPES = (*GGUF_FORMS, NVFP4)
_LEGACY = tuple(name for name, form in GGUF_FORMS.items() if form.block == 32)


def _nvfp4_parts(n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random codes, scales of all sizes, and a number."""
    draw = seeded(seed)
    codes = torch.randint(0, 256, (n, k // 2), generator=draw, dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (n, k // 16), generator=draw, dtype=torch.uint8)
    return codes, scales.view(torch.float8_e4m3fn), torch.tensor([0.0123])


def _weight(type_: str, n: int, k: int, seed: int = 0) -> GgmlTensor:
    if type_ == NVFP4:
        return pack_nvfp4(*_nvfp4_parts(n, k, seed))
    raw = random_rows(type_, n, k, np.random.default_rng(seed))
    return pack(type_, torch.from_numpy(raw), k)


def _ggml_values(type_: str, n: int, k: int, seed: int = 0) -> npt.NDArray[np.float32]:
    raw = random_rows(type_, n, k, np.random.default_rng(seed))
    found: npt.NDArray[np.float32] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_])
    return found


def _rows(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(m, k, generator=seeded(m)).to(dtype)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("n", [1, 16, 35])
def test_repacked_weights_are_bit_equal_to_ggml(type_: str, n: int) -> None:
    found = dense(_weight(type_, n, 768)).numpy()
    assert np.array_equal(found.view(np.int32), _ggml_values(type_, n, 768).view(np.int32))


@pytest.mark.parametrize("type_", _LEGACY)
def test_rows_that_end_inside_a_column_block_are_bit_equal_to_ggml(type_: str) -> None:
    found = dense(_weight(type_, 17, 352)).numpy()
    assert np.array_equal(found.view(np.int32), _ggml_values(type_, 17, 352).view(np.int32))


@pytest.mark.parametrize("type_", PRODUCT_TYPES)
def test_packed_bytes_are_those_of_the_tensors(type_: str) -> None:
    assert bytes_of(_weight(type_, 35, 512)) == packed_bytes(type_, 35, 512)


@pytest.mark.parametrize("type_", FORMS)
def test_a_weight_without_numbers_has_as_many_bytes(type_: str) -> None:
    assert bytes_of(empty(type_, 35, 768, torch.device("meta"))) == packed_bytes(type_, 35, 768)


@pytest.mark.parametrize(("n", "k"), [(1, 256), (35, 768), (17, 352)])
def test_repacked_nvfp4_is_that_of_the_specification(n: int, k: int) -> None:
    codes, scales, number = _nvfp4_parts(n, k, 1)
    expected = float_checkpoints.nvfp4_values(codes, scales, float(number))
    # The products of fp64 are exact, so fp32 rounds once, as the packed form does.
    assert torch.equal(dense(pack_nvfp4(codes, scales, number)), expected.float())


def _permuted(a: int, b: int, selector: int) -> int:
    """Emulate PTX's prmt.b32: bytes of two words by four selectors, of which bit 3 replicates the sign."""
    data = [(word >> 8 * i) & 255 for word in (a, b) for i in range(4)]
    picks = [(selector >> 4 * i) & 15 for i in range(4)]
    chosen = [(255 if data[p & 7] > 127 else 0) if p & 8 else data[p & 7] for p in picks]
    return sum(byte << 8 * i for i, byte in enumerate(chosen))


def test_byte_permutations_decode_every_e2m1_code() -> None:
    source = inspect.getsource(tile_ops._floats.fn)
    first, second = (
        (int(low, 16), int(high, 16))
        for low, high in re.findall(r"prmt.b32 [ab], (0x\w+), (0x\w+)", source)
    )
    values = [4 * float_checkpoints.e2m1(code) for code in range(16)]
    for code in range(16):
        four = [code, 15 - code, code ^ 8, (code + 5) % 16]
        word = sum(each << 4 * i for i, each in enumerate(four))
        both = _permuted(*first, word) | _permuted(*second, word ^ 0x8888)
        found = torch.tensor([both << 1]).view(torch.int8)[:4].tolist()
        assert found == [values[each] for each in four]


def test_repacking_many_rows_in_slices_changes_nothing() -> None:
    found = dense(_weight("Q4_0", 2100, 32)).numpy()
    assert np.array_equal(found, _ggml_values("Q4_0", 2100, 32))


def test_other_formats_and_lengths_are_refused() -> None:
    raw = torch.zeros(4, 18, dtype=torch.uint8)
    with pytest.raises(ValueError, match="IQ2_XS given"):
        pack("IQ2_XS", raw, 256)
    with pytest.raises(ValueError, match="36 bytes for 64 columns"):
        pack("Q4_0", raw, 64)


def _close(found: torch.Tensor, x: torch.Tensor, weight: GgmlTensor | GgmlWeight) -> None:
    """Sums differ by their order alone: x is read as it is, and no weight is rounded."""
    w = dense(weight, torch.float64)
    expected = x.double() @ w.t()
    size = x.double().abs() @ w.abs().t()
    parts = weight.parts if isinstance(weight, GgmlWeight) else (weight,)
    if any(part.form.minimum for part in parts):
        size = size * 8  # codes times scales and minimums cancel
    assert ((found.double() - expected).abs() <= 2e-6 * size + 1e-9).all()


needs_interpreter = pytest.mark.skipif(not interpreted(), reason="runs in Triton's interpreter")


def _int8_rows(m: int, k: int) -> Int8Rows:
    rows = Int8Rows.empty(m, k, DEVICE, 16)
    int4_reference.quantize(_rows(m, k, torch.float32), rows)
    return rows


@needs_interpreter
@pytest.mark.parametrize("type_", PRODUCT_TYPES)
@pytest.mark.parametrize(
    ("m", "n", "config"),
    [
        (1, 35, TileConfig(1, 2, 1, 1)),
        (2, 16, TileConfig(1, 1, 1, 1)),
        (3, 32, TileConfig(2, 2, 1, 1)),
        (6, 32, TileConfig(2, 1, 1, 2)),
    ],
)
def test_products_of_few_rows_are_those_of_the_reference(
    type_: str, m: int, n: int, config: TileConfig
) -> None:
    weight, rows = _weight(type_, n, 512), _int8_rows(m, 512)
    out = torch.full((config.splits, m, n + 3), float("nan"))
    gemm_int8.gemm(rows, weight, out, config, 2)
    _close(out.sum(0)[:, 2 : n + 2], int4_reference.natural_int8(rows), weight)
    assert out[:, :, :2].isnan().all()
    assert out[:, :, -1].isnan().all()


@needs_interpreter
def test_rows_are_divided_by_their_rms_in_the_product() -> None:
    weight, x = _weight("Q4_K", 16, 512), _rows(3, 512, torch.float32)
    rows, squares = _int8_rows(3, 512), x.square().view(3, 4, 128).sum(-1)
    found = ggml.gemm_rows(rows, GgmlWeight((weight,)), RowNorm(squares, 0.1))
    expected = int4_reference.gemm_rows(rows, GgmlWeight((weight,)), RowNorm(squares, 0.1))
    assert torch.allclose(found.sum(0), expected[0], rtol=1e-5, atol=1e-5)
    normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 0.1)
    error = (expected[0] - normed @ dense(weight).t()).norm() / expected.norm()
    assert error < 1e-4


@needs_interpreter
def test_rows_are_written_in_the_order_of_the_products() -> None:
    x, rows = _rows(2, 256, torch.float32), Int8Rows.empty(2, 256, DEVICE, 16)
    prepare("plain", x[None], rows)
    assert torch.allclose(int4_reference.natural_int8(rows), x, atol=2e-4)
    whole = (x.view(2, 2, 128) / rows.factors[:, :2, 0].t()[..., None]).round().int()
    sums = rows.factors.view(torch.int32)[:, :2].transpose(0, 1)
    assert (sums[..., 4:8] - whole.view(2, 2, 4, 32).sum(-1)).abs().max() <= 2
    assert (sums[..., 8:] - whole.view(2, 2, 8, 16).sum(-1)).abs().max() <= 2


@needs_interpreter
@pytest.mark.parametrize("type_", PRODUCT_TYPES)
@pytest.mark.parametrize("whole", [False, True])
def test_products_of_many_rows_are_those_of_the_reference(type_: str, whole: bool) -> None:
    weight, x = _weight(type_, 35, 512), _rows(17, 512, torch.float16)
    out = torch.full((2, 17, 38), float("nan"))
    config = TiledGemmConfig(TileConfig(1, 2, 2, 2), 16)
    gemm_tiles.gemm(x, weight, out, config, 2, whole_halves=whole)
    expected = gemm_tiles.reference(x, weight)
    error = (out.sum(0)[:, 2:37] - expected).norm() / expected.norm()
    assert error < 5e-4  # of weights in fp16
    assert out[:, :, :2].isnan().all()
    assert out[:, :, -1].isnan().all()


@needs_interpreter
@pytest.mark.parametrize("type_", ["Q4_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize(("m", "k"), [(1, 640), (1, 352), (17, 352)])
def test_columns_beyond_the_last_whole_block_are_read_once(type_: str, m: int, k: int) -> None:
    weight, x = _weight(type_, 16, k), _rows(m, k, torch.float32)
    found = ggml.gemm(x, GgmlWeight((weight,))).sum(0)
    expected = gemm_tiles.reference(x, weight)
    assert (found - expected).norm() / expected.norm() < 1e-4
    out = torch.full((1, m, 16), float("nan"))
    config = TiledGemmConfig(TileConfig(1, 2, 2, 1), 16)
    gemm_tiles.gemm(x, weight, out, config, whole_halves=True)
    assert (out[0] - expected).norm() / expected.norm() < 1e-4


@needs_interpreter
@pytest.mark.parametrize("type_", PRODUCT_TYPES)
def test_dequantized_weights_are_bit_equal_to_the_reference(type_: str) -> None:
    weight = _weight(type_, 35, 512)
    out = torch.full((35, 512), float("nan"))
    gemm_tiles.dequantize(weight, out)
    assert torch.equal(out, dense(weight))


@needs_interpreter
@pytest.mark.parametrize("m", [1, 64, 257])
def test_parts_of_several_formats_make_one_product(m: int) -> None:
    weight = GgmlWeight((_weight("Q4_K", 32, 256), _weight("Q6_K", 16, 256, 1)))
    x = _rows(m, 256, torch.float32)
    found, expected = ggml.gemm(x, weight).sum(0), ggml.gemm(x, weight, kernels=False)[0]
    assert (found - expected).norm() / expected.norm() < 1e-4
    _close(expected, x, weight)


def test_neighbours_of_one_format_are_joined() -> None:
    parts = [_weight("Q4_K", 32, 256), _weight("Q4_K", 9, 256, 1), _weight("Q6_K", 16, 256, 2)]
    found = with_neighbours_joined(parts)
    assert [(each.type, each.features_out) for each in found] == [("Q4_K", 41), ("Q6_K", 16)]
    assert torch.equal(dense(GgmlWeight(found)), dense(GgmlWeight(tuple(parts))))
    assert len(with_neighbours_joined(parts[1:2] * 2)) == 2  # a tile would be in both


@needs_interpreter
def test_an_unpacked_copy_serves_steps_of_many_rows() -> None:
    weight, x = _weight("Q4_K", 32, 256), _rows(65, 256, torch.float32)
    one = GgmlWeight((weight,), unpacked=torch.ones(32, 256))
    assert torch.equal(ggml.gemm(x, one)[0], x @ torch.ones(256, 32))


@needs_interpreter
def test_wrong_rows_and_columns_are_refused() -> None:
    weight, rows = _weight("Q4_0", 16, 256), _int8_rows(1, 256)
    config = TileConfig(1, 1, 1, 1)
    nine = Int8Rows(torch.empty(18, 256, dtype=torch.int8), rows.factors, 16)
    with pytest.raises(ValueError, match="rows: 1 to 8"):
        gemm_int8.gemm(nine, weight, torch.empty(1, 9, 16), config)
    with pytest.raises(ValueError, match="in groups of 128"):
        gemm_int8.gemm(Int8Rows.empty(1, 256, DEVICE), weight, torch.empty(1, 1, 16), config)
    with pytest.raises(ValueError, match="16 columns from 1 of 16"):
        gemm_int8.gemm(rows, weight, torch.empty(1, 1, 16), config, 1)
