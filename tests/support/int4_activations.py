"""Comparison of int4 `prepare` with its reference, on a CPU or a GPU."""

import torch

from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4.activations import HalfRows, Int8Rows
from tests.support import int4_reference
from tests.support.int4_weights import values
from tests.support.seeded import seeded


def compare_prepare(
    mode: w4_activations.Mode, kind: str, rows: int, ordered: bool, device: torch.device,
    group: int = 128,
) -> None:  # fmt: skip
    """Assert that kernel and reference write equal rows, residual and squares."""
    k, splits = 384, 3
    order = torch.randperm(k, generator=seeded(5)).int().to(device) if ordered else None
    columns = 2 * k + 16 if mode == "act_and_mul" else k + 16 if mode == "plain" else k
    source = (
        values(rows + 1, k).to(device)
        if mode == "embed"
        else values(splits * rows, columns).view(splits, rows, columns).to(device)
    )
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    for call, held in ((w4_activations.prepare, found), (int4_reference.prepare, wanted)):
        out: w4_activations.Rows = (
            Int8Rows.empty(rows, k, device, group)
            if kind == "int8"
            else HalfRows.empty(rows, k, device, "lanes" if kind == "lanes" else "slots", group)
        )
        residual = values(rows, k).to(device) + 1
        squares = torch.full((rows, 3), float("nan"), device=device)
        ids = torch.arange(rows, device=device) + 1 if mode == "embed" else None
        call(
            mode, source, out, ids=ids, residual=residual, weight=values(1, k)[0].to(device), squares=squares,
            order=order,
        )  # fmt: skip
        held += [out.x.float(), out.factors, residual]
        if mode in ("embed", "norm"):
            held.append(squares.sum(1))  # their distribution over the columns is free
    # rounding may differ by one unit of the low byte where a value lies between two
    assert float((found[0] - wanted[0]).abs().max()) <= (1.0 if kind == "int8" else 1e-2)
    # ... and the factors hold sums of what was rounded, one of them times 1024
    for one, other in zip(found[1:], wanted[1:], strict=True):
        assert float((one - other).norm()) <= 1e-4 * float(other.norm()) + 1e-3
