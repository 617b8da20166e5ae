import pytest
import torch

from localchat_cuda.kernels import skinny_gemm
from localchat_cuda.kernels.launch import Traits


@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize(("n", "k"), [(6, 96), (130, 128), (4, 1152)])
def test_gemm_matches_the_reference(rows: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(rows * n + k)
    x = torch.randn(rows, k, generator=generator).half()
    weight = torch.randn(n, k, generator=generator).half()
    out = torch.full((rows, n), float("nan"))
    skinny_gemm.gemm(x, weight, out)
    wanted = skinny_gemm.reference(x, weight)
    assert float((out - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.parametrize("rows", [2, 9, 16])
def test_narrow_programs_match_the_reference(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = Traits.of((9, 0), 132)
    tile = skinny_gemm._tile_for(3584, 18944, 16, hopper)
    assert tile.features == 32 != skinny_gemm._tile_for(4608, 3584, 16, hopper).features
    monkeypatch.setattr(skinny_gemm, "_tile_for", lambda *shape: tile)
    x, weight = torch.randn(rows, 512).half(), torch.randn(70, 512).half()
    out = torch.full((rows, 70), float("nan"))
    skinny_gemm.gemm(x, weight, out)
    wanted = skinny_gemm.reference(x, weight)
    assert float((out - wanted).norm() / wanted.norm()) < 1e-3


def test_more_than_64_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 64 rows"):
        skinny_gemm.gemm(
            torch.zeros(65, 64).half(), torch.zeros(16, 64).half(), torch.zeros(65, 16)
        )
