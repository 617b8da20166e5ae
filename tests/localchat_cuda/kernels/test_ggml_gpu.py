"""Gemms with ggml's block formats on an NVIDIA GPU: every format and row count against the reference.

TRITON_INTERPRET=0 pytest tests/localchat_cuda."""

import numpy as np
import pytest
import torch

from localchat_cuda.ggml_forms import GGUF_FORMS, NVFP4
from localchat_cuda.kernels import ggml
from localchat_cuda.kernels.ggml import gemm_tiles
from localchat_cuda.kernels.ggml.pack import GgmlTensor, GgmlWeight, dense, pack, pack_nvfp4
from tests.support import float_checkpoints
from tests.support.ggml_blocks import random_rows
from tests.support.tiny_engine_core import DEVICE, ON_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU, or TRITON_INTERPRET is not 0"),
]


def _weight(type_: str, n: int, k: int, size: float) -> GgmlTensor:
    if type_ == NVFP4:
        return pack_nvfp4(*float_checkpoints.nvfp4_parts(torch.randn(n, k, device=DEVICE) * size))
    raw = random_rows(type_, n, k, np.random.default_rng(0), size=size)
    return pack(type_, torch.from_numpy(raw).to(DEVICE), k)


@pytest.mark.parametrize("type_", [*GGUF_FORMS, NVFP4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_on_the_gpu_are_those_of_the_reference(type_: str, dtype: torch.dtype) -> None:
    weight = _weight(type_, 1000, 3584, 0.001)
    for m in (1, 7, 16, 64, 257):
        x = torch.randn(m, 3584, device=DEVICE).to(dtype)
        expected = gemm_tiles.reference(x, weight)
        found = ggml.gemm(x, GgmlWeight((weight,)), wide=True).sum(0, dtype=torch.float32)
        error = (found - expected).norm() / expected.norm()
        assert error < (1e-3 if m <= ggml.FEW_ROWS or dtype == torch.float16 else 1e-2)


@pytest.mark.parametrize("type_", [*GGUF_FORMS, NVFP4])
def test_weights_dequantized_on_the_gpu_are_the_references(type_: str) -> None:
    weight = _weight(type_, 1000, 3584, 0.02)
    out = torch.empty(1000, 3584, device=DEVICE)
    gemm_tiles.dequantize(weight, out)
    assert torch.allclose(out, dense(weight), rtol=1e-6, atol=1e-6)
