"""Times the cost of sorted columns (GPTQ's act-order).

Every kernel that writes activations runs with an order and without, after a check against its
reference.
"""

from collections.abc import Callable
from functools import partial

import torch

from localchat_cuda.kernels import permute_columns
from localchat_cuda.kernels.attention import decode as decode_attention
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import tile_config as w4_tile_config
from scripts.bench.kernels.timing import GPU, HEADS, HIDDEN, D, Results, error, rows_for, timed
from tests.support import int4_reference

ROWS, PROMPT = (1, 8, 16, 32, 128), 2048
_TIMES = 40


def ordered() -> Results:
    """Microseconds of one launch, in a graph of forty."""
    found: Results = {}
    order = torch.randperm(HIDDEN, device=GPU).int()
    for m in ROWS:
        for name, decoder in (("plain", None), ("ordered", order)):
            for kind, call in calls(m, decoder).items():
                us = timed([call] * _TIMES) / _TIMES
                found[f"{kind}_{name}_M{m}_us"] = us
                print(f"{kind:6} {name:8} M={m:3} {us:6.2f} us", flush=True)
    x = torch.randn(PROMPT, HIDDEN, device=GPU, dtype=torch.float16)
    assert torch.equal(permute_columns.gather(x, order), permute_columns.reference(x, order))
    for name, move in (("kernel", permute_columns.gather), ("torch", permute_columns.reference)):
        us = timed([partial(move, x, order)] * 8) / 8
        found[f"gather_{name}_us"] = us
        print(f"gather of {PROMPT} rows, {name}: {us:.1f} us, {4 * x.numel() / us / 1e6:.2f} TB/s")
    return found


def calls(m: int, order: torch.Tensor | None) -> dict[str, Callable[[], None]]:
    """The norm after `down`, and the merge of attention, for so many rows."""
    variant = w4_tile_config.variant_for(m)
    rows, wanted = rows_for(variant, m, HIDDEN), rows_for(variant, m, HIDDEN)
    sums = torch.randn(5, m, HIDDEN, device=GPU)
    gain = torch.rand(HIDDEN, device=GPU).half()
    residual = torch.zeros(m, HIDDEN, device=GPU)
    squares = torch.empty(m, HIDDEN // 128, device=GPU)
    feed = partial(
        w4_activations.prepare, "norm", sums, rows, residual=residual, weight=gain, squares=squares,
        order=order,
    )  # fmt: skip
    partials = decode_attention.Partials.empty(8, m, HEADS, D, GPU)
    partials.sums.normal_()
    partials.peaks.normal_()
    partials.masses.uniform_(1.0, 2.0)
    merge = partial(decode_attention.merge, partials, rows, order=order)
    feed()
    int4_reference.prepare(
        "norm", sums, wanted, residual=torch.zeros_like(residual), weight=gain,
        squares=torch.empty_like(squares), order=order,
    )  # fmt: skip
    assert error(_numbers(rows), _numbers(wanted)) < 1e-2, (m, "norm")
    flat = torch.empty(m, HIDDEN, device=GPU, dtype=torch.float16)
    decode_attention.merge(partials, flat)
    merge()
    int4_reference.prepare("plain", flat[None], wanted, order=order)
    assert error(rows.factors, wanted.factors) < 1e-2, (m, "merge")
    return {"norm": feed, "merge": merge}


def _numbers(rows: w4_activations.Rows) -> torch.Tensor:
    """The written values in fp32; a pair of bytes as one number, since a tie may be rounded to either
    side.
    """
    x = rows.x.float()
    return x if isinstance(rows, w4_activations.HalfRows) else 256 * x[0::2] + x[1::2]
