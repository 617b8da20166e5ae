"""Shared by tests: CPU, relative, values, weight."""

import torch

from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.kernels.int4.pack import BLOCK_K, W4
from tests.support.seeded import seeded

CPU = torch.device("cpu")


def weight(n: int, k: int, seed: int = 0, group: int = BLOCK_K) -> W4:
    generator = seeded(seed)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    scales = torch.rand(n, k // group, generator=generator) * 0.01 + 0.005
    zeros = torch.randint(0, 16, (n, k // group), generator=generator)
    return w4_pack.pack(codes, scales, zeros)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def values(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, generator=seeded(m * k)) * 3
