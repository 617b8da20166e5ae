"""The W4A8 gemm of prompts, on a CPU with the library replaced by plain torch.

On a GPU: TRITON_INTERPRET=0 pytest tests/localchat_cuda/kernels/test_int4_e4m3.py."""

import pytest
import torch

from localchat_cuda.kernels import int4
from localchat_cuda.kernels.int4 import gemm_e4m3
from localchat_cuda.kernels.int4.pack import W4, E4M3Copy, dense, pack
from localchat_cuda.weights.formats.weight import bytes_of
from tests.support.fp8_reference import round_rows
from tests.support.seeded import seeded
from tests.support.tiny_engine_core import DEVICE, ON_GPU

pytestmark = pytest.mark.skipif(
    ON_GPU and torch.cuda.get_device_capability() != (9, 0),
    reason="the library has this gemm for compute capability 9.0 alone",
)

N = 48
K = 384


def weight(group: int = 128) -> W4:
    draw = seeded(1)
    codes = torch.randint(0, 16, (N, K), generator=draw)
    zeros = torch.randint(0, 16, (N, K // group), generator=draw)
    scales = torch.rand(N, K // group, generator=draw) * 0.01 + 0.001
    return pack(codes.to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE))


def numbers(rows: int, seed: int) -> torch.Tensor:
    draw = seeded(seed)
    return torch.randn(rows, K, generator=draw).half().to(DEVICE)


def floating(copy: E4M3Copy) -> torch.Tensor:
    return copy.codes.float() * copy.scales.t().repeat_interleave(128, 1)


def test_an_e4m3_copy_loses_nothing() -> None:
    packed = weight()
    copy = gemm_e4m3.unpack(packed)
    assert torch.equal(floating(copy), dense(packed))
    assert bytes_of(packed._replace(unpacked=copy)) == bytes_of(packed) + N * K + 4 * N * K // 128


def test_other_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 128"):
        gemm_e4m3.unpack(weight(64))


@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gemm_multiplies_rounded_rows(rows: int, dtype: torch.dtype) -> None:
    x = numbers(rows, 2)
    copy = gemm_e4m3.unpack(weight())
    codes, scales = round_rows(x, blocks=True)
    wanted = codes.float() * scales.repeat_interleave(128, 1) @ floating(copy).t()
    found = gemm_e4m3.gemm(x, copy, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, rtol=1e-3, atol=1e-3)


def test_only_steps_with_prompts_round_their_rows() -> None:
    packed = weight()
    packed = packed._replace(unpacked=gemm_e4m3.unpack(packed))
    x = numbers(300, 3)
    exact = x.float() @ dense(packed).t()

    def error(prompts: bool) -> float:
        found = int4.gemm_of(x, packed, prompts=prompts).float().sum(0)
        return float((found - exact).norm() / exact.norm())

    assert error(prompts=False) < 2e-3
    assert 1e-2 < error(prompts=True) < 4e-2


def test_nan_stays_nan() -> None:
    x = torch.ones(1, K, dtype=torch.float16, device=DEVICE)
    x[0, 5] = float("nan")
    assert bool(gemm_e4m3.gemm(x, gemm_e4m3.unpack(weight()), torch.float16).isnan().all())
