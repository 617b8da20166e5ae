"""Kernels of alternating updates, and of sparse activations, against plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from localchat_cuda.kernels import activation, altup
from localchat_cuda.kernels.altup import Added, AltUpWeights

EPS = 1e-6
Tensors = list[torch.Tensor]


def numbers(*extents: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*extents, generator=torch.Generator().manual_seed(seed + sum(extents)))


def weights_of(a: int, h: int, dtype: torch.dtype = torch.float32) -> AltUpWeights:
    """A router that tells rows apart, in spite of its division by H."""
    return AltUpWeights(*(
        each.to(dtype)
        for each in (
            numbers(a, h) * h**0.5, numbers(h, seed=1), numbers(a * a, a, seed=2),
            numbers(a, a, seed=3), numbers(h, seed=4),
        )
    ))  # fmt: skip


def part(splits: int, rows: int, h: int, seed: int, dtype: torch.dtype) -> Added:
    return Added(numbers(splits, rows, h, seed=seed).to(dtype), numbers(h, seed=seed).to(dtype))


def closest(found: Tensors, wanted: Tensors, dtype: torch.dtype = torch.float32) -> bool:
    near = 1e-5 if dtype == torch.float32 else 1e-2
    return all(
        torch.allclose(a.float(), b.float(), atol=near, rtol=near)
        for a, b in zip(found, wanted, strict=True)
    )


SHAPES = [(4, 3, 256, 1), (4, 1, 200, 3), (2, 2, 64, 2), (3, 2, 130, 1)]
"""(streams, rows, columns, partial sums)."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("a", "rows", "h", "splits"), SHAPES)
@pytest.mark.parametrize("first", [True, False])
def test_predict_matches_the_reference(
    first: bool, a: int, rows: int, h: int, splits: int, dtype: torch.dtype
) -> None:
    weights, gain = weights_of(a, h, dtype), numbers(h, seed=5).to(dtype)
    before = None if first else part(splits, rows, h, 6, dtype)

    def run(call: Callable[..., None]) -> Tensors:
        streams, out = numbers(a, rows, h), torch.full((rows, h), float("nan"), dtype=dtype)
        call(streams, weights, gain, out, EPS, before)
        return [streams, out]

    assert closest(run(altup.predict), run(altup.predict_reference), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("a", "rows", "h", "splits"), SHAPES)
def test_add_laurel_and_correct_match_their_references(
    a: int, rows: int, h: int, splits: int, dtype: torch.dtype
) -> None:
    weights, gains = weights_of(a, h, dtype), (numbers(h, seed=5), numbers(h, seed=6))
    attention, laurel = part(splits, rows, h, 7, dtype), part(1, rows, h, 8, dtype)
    mlp = part(splits, rows, h, 9, dtype)

    def run(add: Callable[..., None], correct: Callable[..., None]) -> Tensors:
        streams, residual = numbers(a, rows, h), torch.full((rows, h), float("nan"))
        inner, out = (torch.full((rows, h), float("nan"), dtype=dtype) for _ in range(2))
        add(streams, attention, laurel, gains, residual, inner, EPS)
        held = residual.clone()
        correct(streams, residual, mlp, weights, out, EPS)
        assert torch.equal(residual, held)
        return [streams, residual, inner, out]

    found = run(altup.add_laurel, altup.correct)
    assert closest(found, run(altup.add_laurel_reference, altup.correct_reference), dtype)


def test_streams_far_beyond_fp16_are_kept() -> None:
    weights, large = weights_of(4, 64), 1e6
    streams, out = numbers(4, 2, 64) * large, torch.empty(2, 64, dtype=torch.float16)
    wanted, other = streams.clone(), torch.empty(2, 64)
    altup.predict(streams, weights, numbers(64), out, EPS)
    altup.predict_reference(wanted, weights, numbers(64), other, EPS)
    assert closest([streams / large, out], [wanted / large, other], torch.float16)


@pytest.mark.parametrize("name", ["predict", "add_laurel", "correct", "sparse"])
def test_a_nan_reaches_its_row_and_no_other(name: str) -> None:
    weights, gain = weights_of(4, 64), torch.ones(64)
    streams, residual, out = numbers(4, 3, 64), numbers(3, 64), torch.empty(3, 64)
    y = numbers(1, 3, 64)
    y[0, 1, 5] = float("nan")
    calls: dict[str, Callable[[], Any]] = {
        "predict": lambda: altup.predict(streams, weights, gain, out, EPS, Added(y, gain)),
        "add_laurel": lambda: altup.add_laurel(
            streams,
            Added(y, gain),
            Added(numbers(1, 3, 64), gain),
            (gain, gain),
            residual,
            out,
            EPS,
        ),
        "correct": lambda: altup.correct(streams, residual, Added(y, gain), weights, out, EPS),
        "sparse": lambda: activation.act_and_mul(
            torch.cat((y, numbers(1, 3, 64, seed=1)), 2), out, gelu=True, cutoff=1.0
        ),
    }
    calls[name]()
    found = streams[1:] if name == "predict" else out[None]
    assert bool(found[:, 1].isnan().all())
    assert not bool(found[:, ::2].isnan().any())


@pytest.mark.parametrize("cutoff", [1.6449, 0.0, -0.5])
@pytest.mark.parametrize(("splits", "columns"), [(1, 200), (3, 1030)])
def test_sparse_activations_match_the_reference(splits: int, columns: int, cutoff: float) -> None:
    x = numbers(splits, 3, 2 * columns)
    x[..., :columns] += 0.7
    out = torch.full((3, columns), float("nan"))
    activation.act_and_mul(x, out, gelu=True, cutoff=cutoff)
    assert torch.allclose(out, activation.reference(x, gelu=True, cutoff=cutoff), atol=1e-5)
    shares = torch.special.ndtr(torch.tensor(cutoff))
    assert abs(float((out == 0).float().mean() - shares)) < 0.05


@pytest.mark.parametrize("splits", [1, 2])
def test_an_activation_is_multiplied_by_rows_of_another_tensor(splits: int) -> None:
    gate, held = numbers(splits, 3, 96), numbers(3, 5, 96).half()
    out = torch.empty(3, 96)
    activation.act_and_mul(gate, out, gelu=True, up=held[:, 2])
    both = torch.cat((gate.sum(0), held[:, 2].float()), 1)
    assert torch.allclose(out, activation.reference(both, gelu=True), atol=1e-5)


def test_wrong_arguments_raise_with_their_name() -> None:
    weights, gain = weights_of(4, 64), torch.ones(64)
    streams, residual, out = numbers(4, 2, 64), numbers(2, 64), torch.empty(2, 64)
    added = Added(numbers(1, 2, 64), gain)
    with pytest.raises(ValueError, match="streams"):
        altup.predict(streams.half(), weights, gain, out, EPS)
    with pytest.raises(ValueError, match="prediction"):
        altup.predict(
            streams[:3].clone(), weights._replace(router=weights.router[:3]), gain, out, EPS
        )
    with pytest.raises(ValueError, match="gains"):
        altup.add_laurel(streams, added, added, (gain, gain[:32]), residual, out, EPS)
    with pytest.raises(ValueError, match="y"):
        altup.correct(streams, residual, Added(added.y[:, :1], gain), weights, out, EPS)
    with pytest.raises(ValueError, match="up"):
        activation.act_and_mul(added.y, out, up=out[:, :32])
