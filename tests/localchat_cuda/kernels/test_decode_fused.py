"""Rotary embedding, storing and decode attention in one launch, in Triton's interpreter."""

import pytest
import torch

from localchat_cuda.config.rope import Rotation
from localchat_cuda.kernels import rope
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.attention import decode_fused
from localchat_cuda.kernels.attention import reference as attention_reference
from localchat_cuda.kernels.attention.decode import Partials
from localchat_cuda.kernels.attention.reference import Rules
from tests.support.attention_scenes import PAGE, close, numbers, scene
from tests.support.tiny_engine_core import DEVICE

WINDOW = Rules(window=50, sinks=torch.tensor([2.0, -1.0], device=DEVICE))


@pytest.mark.parametrize(
    ("lengths", "heads", "parts", "splits", "rules", "extras", "turning"),
    [
        ((1, 64, 65, 200), (6, 2, 64), 3, 4, Rules(), (), 0),
        ((256, 5), (7, 1, 128), 4, 4, Rules(), ("bias",), 0),
        ((257, 63), (4, 1, 96), 1, 5, Rules(), ("norms",), 0),
        ((300, 129), (4, 2, 128), 2, 8, Rules(), ("bias", "norms"), 96),
        ((64,), (1, 1, 96), 2, 1, Rules(), (), 24),
        ((300, 49, 50, 51), (2, 1, 64), 2, 8, WINDOW, (), 0),
        ((300, 65), (2, 1, 64), 2, 8, Rules(window=1), (), 0),
        ((130,), (16, 1, 64), 2, 16, Rules(soft_cap=5.0, scale=0.3), (), 0),
    ],
)
def test_one_launch_does_what_rope_store_and_attention_do(
    lengths: tuple[int, ...], heads: tuple[int, int, int], parts: int, splits: int, rules: Rules,
    extras: tuple[str, ...], turning: int,
) -> None:  # fmt: skip
    h, j, d = heads
    t, columns = len(lengths), (h + 2 * j) * d
    q, k, v, batch = scene([(1, length) for length in lengths], h, j, d)
    # Rows of longer ones, as those with gates.
    qkv = numbers(parts, t, columns + 32)[..., :columns] / parts**0.5
    angles = rope.angle_table(400, d, Rotation(10000.0, None, turning).radians(d, 400), DEVICE)
    bias = numbers(columns) if "bias" in extras else None
    norms = (numbers(d), numbers(d, seed=1)) if "norms" in extras else (None, None)
    for i, length in enumerate(lengths):  # the new token's cell was never written
        page = batch.tables[i + 1, (length - 1) // PAGE]
        for each in (k, v):
            each[page, :, (length - 1) % PAGE] = float("nan")
    pool = torch.stack((k, v), 1)
    rope.reference(
        qkv, angles, (batch.lengths - 1).int(), batch.slots, batch.tables, q, pool[:, 0],
        pool[:, 1], bias=bias, q_norm=norms[0], k_norm=norms[1], columns=turning,
    )  # fmt: skip
    wanted = attention_reference.reference(q, pool[:, 0], pool[:, 1], batch, rules)
    assert decode_fused.serves(qkv, h, d, k, None)
    partials, out = Partials.empty(splits, t, h, d, DEVICE), torch.full((t, h * d), float("nan"))
    decode_fused.store_and_attend(
        qkv, angles, k, v, batch, partials, rules, dtype=torch.float16, bias=bias,
        q_norm=norms[0], k_norm=norms[1], columns=turning,
    )  # fmt: skip
    decode_attention.merge(partials, out, sinks=rules.sinks)
    close(out, wanted.view(t, -1))
    for found, stored in ((k, pool[:, 0]), (v, pool[:, 1])):
        torch.testing.assert_close(found, stored, rtol=2e-3, atol=2e-3, equal_nan=True)


def test_layers_that_it_does_not_serve() -> None:
    pages = torch.empty(2, 1, PAGE, 128)
    qkv = torch.empty(2, 4, 9 * 128)
    assert decode_fused.serves(qkv, 7, 128, pages, None)
    assert not decode_fused.serves(qkv, 8, 128, pages, None)  # no values of its own
    assert not decode_fused.serves(qkv, 7, 128, pages, torch.empty(0))  # FP8
    assert not decode_fused.serves(torch.empty(2, 4, 19 * 64), 17, 64, pages, None)  # query heads
    wide = torch.empty(2, 4, 9 * 256)
    assert not decode_fused.serves(wide, 7, 256, pages, None)
