import pytest
import torch

from localchat_cuda.kernels import skinny_gemm
from localchat_cuda.kernels.launch import Traits, traits
from tests.support.seeded import seeded


@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize(("n", "k"), [(6, 96), (130, 128), (4, 1152)])
def test_gemm_matches_the_reference(rows: int, n: int, k: int) -> None:
    generator = seeded(rows * n + k)
    x = torch.randn(rows, k, generator=generator).half()
    weight = torch.randn(n, k, generator=generator).half()
    out = torch.full((rows, n), float("nan"))
    skinny_gemm.gemm(x, weight, out)
    wanted = skinny_gemm.reference(x, weight)
    assert float((out - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.parametrize("rows", [2, 9, 16])
@pytest.mark.parametrize(("n", "k"), [(70, 2112), (64, 1000)])
def test_partial_sums_add_up_to_the_reference(rows: int, n: int, k: int) -> None:
    x, weight = torch.randn(rows, k).half(), torch.randn(n, k).half()
    sums = skinny_gemm.partial_sums(x, weight)
    assert sums.shape == (skinny_gemm.splits_for(rows, n, k, traits(x.device)), rows, n)
    assert len(sums) > 1 or n == 64
    wanted = skinny_gemm.reference(x, weight)
    assert float((sums.sum(0) - wanted).norm() / wanted.norm()) < 1e-3


def test_splits_give_every_multiprocessor_a_program_and_do_not_depend_on_the_rows() -> None:
    gpu = Traits.of((9, 0), 132)
    assert skinny_gemm.splits_for(8, 5120, 2880, gpu) == 2
    assert {skinny_gemm.splits_for(m, 2880, 4096, gpu) for m in range(2, 33)} == {3}
    assert skinny_gemm.splits_for(64, 2880, 4096, gpu) == 2
    assert skinny_gemm.splits_for(8, 37888, 3584, gpu) == 1
    assert skinny_gemm.splits_for(8, 128, 2880, gpu) == 4
    assert skinny_gemm.splits_for(1, 5120, 2880, gpu) == 1


def test_more_than_64_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 64 rows"):
        skinny_gemm.gemm(
            torch.zeros(65, 64).half(), torch.zeros(16, 64).half(), torch.zeros(65, 16)
        )
