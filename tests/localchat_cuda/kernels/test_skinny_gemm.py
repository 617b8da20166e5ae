import pytest
import torch

from localchat_cuda.kernels import skinny_gemm


@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize(
    ("n", "k", "biased"), [(6, 96, True), (130, 128, False), (130, 128, True), (4, 1152, False)]
)
def test_gemm_matches_the_reference(rows: int, n: int, k: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows * n + k)
    x = torch.randn(rows, k, generator=generator).half()
    weight = torch.randn(n, k, generator=generator).half()
    bias = torch.randn(n, generator=generator) if biased else None
    out = torch.full((rows, n), float("nan"))
    skinny_gemm.gemm(x, weight, out, bias)
    wanted = skinny_gemm.reference(x, weight, bias)
    assert float((out - wanted).norm() / wanted.norm()) < 1e-3


def test_more_than_64_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 64 rows"):
        skinny_gemm.gemm(
            torch.zeros(65, 64).half(), torch.zeros(16, 64).half(), torch.zeros(65, 16)
        )
