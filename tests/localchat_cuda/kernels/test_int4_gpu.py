"""int4 gemms and their activations on an NVIDIA GPU: every mode, format, order and group against the reference.

TRITON_INTERPRET=0 pytest tests/localchat_cuda."""

from itertools import product

import pytest
import torch

from localchat_cuda.kernels import int4
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import gemm_dequant as w4_dequant
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.kernels.int4.activations import Mode
from localchat_cuda.kernels.int4.pack import GROUPS
from localchat_cuda.kernels.int4.row_norm import RowNorm
from tests.support.int4_activations import compare_prepare
from tests.support.int4_weights import relative, values, weight
from tests.support.tiny_engine_core import DEVICE, ON_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU, or TRITON_INTERPRET is not 0"),
]


@pytest.mark.parametrize("mode", ["embed", "norm", "act_and_mul", "plain"])
@pytest.mark.parametrize(
    ("kind", "rows", "ordered", "group"),
    [
        *product(["int8", "lanes", "slots"], [1, 5], [False], [128]),
        *product(["int8", "lanes", "slots"], [2, 5], [True], [128]),
        *product(["lanes", "slots"], [45], [False, True], [128]),
        *product(["int8", "lanes"], [1, 5], [False], [32, 64]),
        ("slots", 45, True, 32),
    ],
)
def test_prepare_matches_the_reference(
    mode: Mode, kind: str, rows: int, ordered: bool, group: int
) -> None:
    compare_prepare(mode, kind, rows, ordered, DEVICE, group)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9, 16, 17, 32, 40, 100, 600])
@pytest.mark.parametrize(("n", "k"), [(768, 640), (3584, 1024)])
def test_gemms_of_every_row_count_match_the_dense_weight(
    n: int, k: int, rows: int, group: int
) -> None:
    """int8, fp16, tiled and Hopper form by their rule, with a norm; the sums of a row count repeat."""
    held = weight(n, k, group=group)
    on_gpu = held._replace(codes=held.codes.to(DEVICE), scale_zeros=held.scale_zeros.to(DEVICE))
    x = values(rows, k)
    squares = x.square().view(rows, k // 128, 128).sum(-1)
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    wanted = wanted @ w4_pack.dense(held).t()
    activations = int4.empty_activations(rows, k, DEVICE, group)
    w4_activations.prepare("plain", x[None].to(DEVICE), activations)
    found = [
        int4.gemm(activations, on_gpu, RowNorm(squares.to(DEVICE), 1e-6)).sum(0).cpu()
        for _ in range(3)
    ]
    assert relative(found[0], wanted) < 1e-3
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", GROUPS)
def test_dequantized_weights_are_the_dense_ones(group: int, dtype: torch.dtype) -> None:
    held = weight(64, 640, group=group)
    on_gpu = held._replace(codes=held.codes.to(DEVICE), scale_zeros=held.scale_zeros.to(DEVICE))
    out = torch.full((64, 640), float("nan"), dtype=dtype, device=DEVICE)
    w4_dequant.dequantize(on_gpu, out)
    assert torch.equal(out.cpu(), w4_pack.dense(held, dtype))
