"""Weights in ggml's block formats: repacked exactly, multiplied as the reference does."""

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from localchat_cuda.ggml_forms import GGUF_FORMS, packed_bytes
from localchat_cuda.kernels import ggml
from localchat_cuda.kernels.ggml import gemm_tiles
from localchat_cuda.kernels.ggml.pack import GgmlTensor, GgmlWeight, dense, pack
from localchat_cuda.kernels.launch import interpreted
from tests.support.ggml_blocks import random_rows

TYPES = tuple(GGUF_FORMS)
_LEGACY = tuple(name for name, form in GGUF_FORMS.items() if form.block == 32)


def _weight(type_: str, n: int, k: int, seed: int = 0) -> GgmlTensor:
    raw = random_rows(type_, n, k, np.random.default_rng(seed))
    return pack(type_, torch.from_numpy(raw), k)


def _ggml_values(type_: str, n: int, k: int, seed: int = 0) -> npt.NDArray[np.float32]:
    raw = random_rows(type_, n, k, np.random.default_rng(seed))
    found: npt.NDArray[np.float32] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_])
    return found


def _rows(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("n", [1, 16, 35])
def test_repacked_weights_are_bit_equal_to_ggml(type_: str, n: int) -> None:
    found = dense(_weight(type_, n, 768)).numpy()
    assert np.array_equal(found.view(np.int32), _ggml_values(type_, n, 768).view(np.int32))


@pytest.mark.parametrize("type_", _LEGACY)
def test_rows_that_end_inside_a_column_block_are_bit_equal_to_ggml(type_: str) -> None:
    found = dense(_weight(type_, 17, 352)).numpy()
    assert np.array_equal(found.view(np.int32), _ggml_values(type_, 17, 352).view(np.int32))


@pytest.mark.parametrize("type_", TYPES)
def test_packed_bytes_are_those_of_the_tensors(type_: str) -> None:
    assert _weight(type_, 35, 512).bytes == packed_bytes(type_, 35, 512)


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
    if any(part.minimums is not None for part in parts):
        size = size * 8  # codes times scales and minimums cancel
    assert ((found.double() - expected).abs() <= 2e-6 * size + 1e-9).all()


needs_interpreter = pytest.mark.skipif(not interpreted(), reason="runs in Triton's interpreter")


@needs_interpreter
@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(("m", "n", "splits"), [(1, 35, 1), (9, 32, 2)])
def test_products_are_those_of_the_reference(type_: str, m: int, n: int, splits: int) -> None:
    weight, x = _weight(type_, n, 512), _rows(m, 512, torch.float16)
    out = torch.full((splits, m, n + 3), float("nan"))
    gemm_tiles.gemm(x, weight, out, 2)
    _close(out.sum(0)[:, 2 : n + 2], x, weight)
    assert out[:, :, :2].isnan().all()
    assert out[:, :, -1].isnan().all()


@needs_interpreter
@pytest.mark.parametrize("type_", ["Q4_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("m", [1, 17])
def test_columns_beyond_the_last_whole_block_are_read_once(type_: str, m: int) -> None:
    weight, x = _weight(type_, 16, 352), _rows(m, 352, torch.float32)
    out = torch.empty(1, m, 16)
    gemm_tiles.gemm(x, weight, out)
    _close(out[0], x, weight)


@needs_interpreter
@pytest.mark.parametrize("type_", TYPES)
def test_dequantized_weights_are_bit_equal_to_ggml(type_: str) -> None:
    weight = _weight(type_, 35, 512)
    out = torch.full((35, 512), float("nan"))
    gemm_tiles.dequantize(weight, out)
    assert torch.equal(out, dense(weight))


@needs_interpreter
@pytest.mark.parametrize("m", [1, 64, 65])
def test_parts_of_several_formats_make_one_product(m: int) -> None:
    weight = GgmlWeight((_weight("Q4_K", 32, 256), _weight("Q6_K", 16, 256, 1)))
    x = _rows(m, 256, torch.float32)
    found = ggml.gemm(x, weight).sum(0)
    _close(found, x, weight)
    _close(ggml.gemm(x, weight, kernels=False)[0], x, weight)


@needs_interpreter
def test_wrong_rows_columns_and_splits_are_refused() -> None:
    weight, x = _weight("Q4_0", 16, 256), _rows(1, 256, torch.float16)
    with pytest.raises(ValueError, match="1 to 64 rows wanted, 65"):
        gemm_tiles.gemm(_rows(65, 256, torch.float16), weight, torch.empty(1, 65, 16))
    with pytest.raises(ValueError, match="16 columns from 1 of 16"):
        gemm_tiles.gemm(x, weight, torch.empty(1, 1, 16), 1)
    with pytest.raises(ValueError, match="1 to 1 splits wanted, 2"):
        gemm_tiles.gemm(x, weight, torch.empty(2, 1, 16))
