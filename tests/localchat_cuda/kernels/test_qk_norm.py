"""Norms over all queries and over all keys against plain torch."""

import pytest
import torch

from localchat_cuda.kernels import qk_norm
from tests.support.seeded import seeded


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "queries", "keys"), [(0, 64, 64), (1, 192, 64), (5, 64, 192)])
def test_normalize_matches_the_reference(
    splits: int, dtype: torch.dtype, rows: int, queries: int, keys: int
) -> None:
    generator = seeded(rows + splits)
    qkv = torch.randn(splits, rows, queries + 2 * keys, generator=generator).to(dtype)
    q_norm, k_norm = (torch.randn(n, generator=generator).to(dtype) for n in (queries, keys))
    found = [torch.full((rows, queries + 2 * keys), float("nan")) for _ in range(2)]
    qk_norm.normalize(qkv, q_norm, k_norm, found[0], 1e-5)
    qk_norm.reference(qkv, q_norm, k_norm, found[1], 1e-5)
    assert torch.allclose(found[0], found[1], atol=1e-5)
    assert torch.equal(found[1][:, queries + keys :], qkv.float().sum(0)[:, queries + keys :])


def test_a_weight_of_another_width_is_refused() -> None:
    qkv, out = torch.zeros(1, 2, 256), torch.zeros(2, 256)
    with pytest.raises(ValueError, match="qkv"):
        qk_norm.normalize(qkv, torch.zeros(64), torch.zeros(64), out, 1e-5)
