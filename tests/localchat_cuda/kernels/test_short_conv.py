"""Short convolutions of an LFM2 against plain torch: sequences of any length, new or going on, in any order."""

import pytest
import torch

from localchat_cuda.kernels import short_conv
from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.kernels.delta_net import Tokens
from tests.support.tiny_engine_core import DEVICE

ENTRIES = 6
STEPS = [
    [(0, 0, 1)],
    [(3, 7, 1), (1, 0, 2), (0, 1, 1), (2, 2, 1), (5, 0, 0)],
    [(4, 0, 40), (2, 9, 3), (1, 1, 5), (0, 2, 18)],
]
"""Slot, start and width of each sequence."""


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("columns", "taps", "sums", "dtype"),
    [(64, 3, 1, torch.float32), (200, 4, 2, torch.float16), (96, 2, 1, torch.float16)],
)
def test_outputs_and_states_are_their_reference(
    step: list[tuple[int, int, int]], columns: int, taps: int, sums: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(columns)
    slots, _, widths = zip(*step, strict=True)
    total = sum(widths)
    firsts = [sum(widths[:i]) for i in range(len(step))]
    batch = AttentionBatch(
        ints(firsts),
        ints(list(widths)),
        ints([max(1, start + width) for _, start, width in step]),
        ints(list(slots)),
        ints([0])[None],
    )
    tokens = Tokens(
        ints([slot for slot, _, width in step for _ in range(width)]),
        ints([start + i for _, start, width in step for i in range(width)]),
        ints([i for width in widths for i in range(width)]),
    )
    product = torch.randn(sums, total, 3 * columns + 5, device=DEVICE)
    conv = torch.randn(columns, taps, device=DEVICE).to(dtype)
    inputs = torch.randn(ENTRIES, taps - 1, columns, device=DEVICE).to(dtype)
    for slot, start, _ in step:
        inputs[slot, : max(0, taps - 1 - start)] = 0.0 if start else float("nan")
    expected = inputs.clone()
    found = torch.empty(total, columns, dtype=dtype, device=DEVICE)
    wanted = torch.empty_like(found)
    short_conv.apply(product, conv, inputs, tokens, batch, found)
    short_conv.reference(product, conv, expected, tokens, batch, wanted)
    assert bool(wanted.isfinite().all())
    assert torch.allclose(found.float(), wanted.float(), atol=1e-5, rtol=2e-3)
    assert torch.equal(inputs.nan_to_num(), expected.nan_to_num())


def test_wrong_arguments_are_named() -> None:
    empty = torch.zeros(1, 1, 12, device=DEVICE)
    tokens = Tokens(ints([0]), ints([0]), ints([0]))
    batch = AttentionBatch(ints([0]), ints([1]), ints([1]), ints([0]), ints([0])[None])
    conv = torch.zeros(5, 3, device=DEVICE)
    inputs = torch.zeros(1, 2, 5, device=DEVICE)
    with pytest.raises(ValueError, match="product: at least 15 columns wanted"):
        short_conv.apply(empty, conv, inputs, tokens, batch, torch.zeros(1, 5, device=DEVICE))
