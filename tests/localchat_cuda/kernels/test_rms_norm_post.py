"""Post-norm kernels against plain torch."""

import pytest
import torch

from localchat_cuda.kernels import rms_norm, rms_norm_post
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4.activations import HalfRows, Int8Rows
from tests.support import int4_reference
from tests.support.seeded import seeded
from tests.support.tiny_engine_core import DEVICE

EPS = 1e-6


def numbers(*extents: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        *extents,
        generator=seeded(seed + sum(extents)),
    )


def rows_of(kind: str, rows: int, k: int) -> w4_activations.Rows:
    if kind == "int8":
        return Int8Rows.empty(rows, k, DEVICE)
    return HalfRows.empty(rows, k, DEVICE, "lanes" if kind == "lanes" else "slots")


def natural(rows: w4_activations.Rows, m: int, k: int) -> torch.Tensor:
    """Return the values of rows, [M, K]."""
    if isinstance(rows, HalfRows):
        return int4_reference.natural_order(rows.x.float(), rows.order)
    high, low = rows.x.float().view(m, 2, k // 4, 4)[..., [0, 2, 1, 3]].reshape(m, 2, k).unbind(1)
    steps = rows.factors[:, :m, 0].t().repeat_interleave(128, 1) * 16
    return (256 * high + low) * steps


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("weighed", [True, False])
def test_post_norm_matches_the_reference(splits: int, dtype: torch.dtype, weighed: bool) -> None:
    y, post = numbers(splits, 3, 200).to(dtype), numbers(200)
    weight = numbers(200, seed=1) if weighed else None
    found = []
    for call in (rms_norm.add_norm, rms_norm.reference):
        residual, out = numbers(3, 200, seed=7), torch.full((3, 200), float("nan"))
        call(y, residual, weight, out, EPS, post=post, scale=0.3)
        found += [residual, out]
    assert torch.allclose(found[0], found[2], atol=1e-5)
    assert torch.allclose(found[1], found[3], atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "rows", "k", "splits", "size", "ordered"),
    [
        ("int8", 1, 384, 3, 1.0, False),
        ("int8", 5, 384, 1, 1e6, True),
        ("lanes", 9, 384, 2, 1.0, False),
        ("lanes", 9, 384, 2, 1e6, False),
        ("slots", 64, 128, 1, 1e6, False),
        ("slots", 45, 256, 2, 1.0, True),
    ],
)
def test_prepare_writes_the_normed_residual(
    kind: str, rows: int, k: int, splits: int, size: float, ordered: bool
) -> None:
    """Also with a residual far beyond the range of fp16, and with columns in another order."""
    order = torch.randperm(k, generator=seeded(8)).int() if ordered else None
    y, post, weight = numbers(splits, rows, k), numbers(k) * size, numbers(k, seed=1)
    begin = numbers(rows, k, seed=7) * size
    normed = torch.empty(rows, k)
    wanted = begin.clone()
    rms_norm.reference(y, wanted, weight, normed, EPS, post=post, scale=0.3)
    for call in (rms_norm_post.prepare, int4_reference.prepare_post):
        residual, out = begin.clone(), rows_of(kind, rows, k)
        squares = torch.full((rows, k // 128), float("nan"))
        call(y, residual, post, weight, out, squares, EPS, 0.3, order=order)
        assert torch.allclose(residual, wanted, rtol=1e-5, atol=1e-5 * size)
        inverse = torch.rsqrt(squares.sum(1, keepdim=True) / k + EPS)
        found = natural(out, rows, k) * inverse
        if order is not None:
            found = torch.empty_like(found).index_copy_(1, order.long(), found)
        assert float((found - normed).norm() / normed.norm()) < 1e-3
        assert float(squares.max()) < 384 * 100


def test_prepare_norms_a_residual_that_cancels() -> None:
    """The four sums of its size are then mostly rounding error."""
    y, weight = numbers(1, 2, 128), torch.ones(128)
    unit = y[0] / y[0].square().mean(1, keepdim=True).sqrt()
    residual, rows = -1000.0 * unit + numbers(2, 128, seed=3) * 0.01, rows_of("lanes", 2, 128)
    squares = torch.empty(2, 1)
    rms_norm_post.prepare(y, residual, torch.full((128,), 1000.0), weight, rows, squares, 0.0)
    found = natural(rows, 2, 128) * torch.rsqrt(squares / 128)
    wanted = residual / residual.square().mean(1, keepdim=True).sqrt()
    assert float((found - wanted).norm() / wanted.norm()) < 2e-2


def test_wrong_arguments_raise_with_their_name() -> None:
    y, residual, gain = numbers(1, 2, 128), numbers(2, 128), torch.ones(128)
    rows, squares = rows_of("int8", 2, 128), torch.empty(2, 1)
    with pytest.raises(ValueError, match="post"):
        rms_norm_post.prepare(y, residual, gain[:64], gain, rows, squares, EPS)
    with pytest.raises(ValueError, match="squares"):
        rms_norm_post.prepare(y, residual, gain, gain, rows, squares[:1], EPS)
    with pytest.raises(ValueError, match="columns in 128s"):
        rms_norm_post.prepare(y[..., :64], residual[:, :64], gain, gain, rows, squares, EPS)
    with pytest.raises(ValueError, match="out"):
        rms_norm.add_norm(y, residual, gain, torch.empty(2, 64), EPS, post=gain)
