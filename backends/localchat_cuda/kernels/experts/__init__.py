"""Feed-forward layer of experts: each row goes through the few that its router chooses.

Letters as in choice.py and gemm_float.py. Up to FEW_ROWS rows, one launch adds to the residual and chooses
(of several rows two), one computes gate and up and one down, which read the weights of the chosen experts,
each once. More rows are sorted by expert first. The order of all sums is fixed,
nothing waits for the host, and every shape follows from the number of rows: steps can be captured.
"""

from typing import NamedTuple

import torch

from localchat_cuda.kernels.activation import clamped_reference, square_reference
from localchat_cuda.kernels.activation import reference as gated_reference
from localchat_cuda.kernels.experts import blocks, choice, gemm_float, gemm_int4_few, gemm_int4_many
from localchat_cuda.kernels.experts.blocks import Blocks, Product
from localchat_cuda.kernels.experts.choice import FEW_ROWS, Choices, FewRows, Router
from localchat_cuda.kernels.int4 import e2m1
from localchat_cuda.kernels.int4.activations import HalfRows
from localchat_cuda.kernels.int4.pack import BLOCK_K, ROWS, W4, dense
from localchat_cuda.kernels.launch import power_of_two

__all__ = [
    "FEW_ROWS",
    "Experts",
    "Router",
    "apply_few",
    "apply_many",
    "block_rows",
    "multiply",
    "packed_rows",
    "reference",
]


class Experts(NamedTuple):
    """Weights of a layer's experts, in order along the rows of each weight.

    Shared parts come last. Int4 weights of H or F columns that are no multiple of 128 have zeros there, and
    rows as well: F is that multiple then.
    """

    router: Router
    gate_up: torch.Tensor | W4
    """[X * 2F, H], an expert's gate before its up; [X * F, H] without gates."""
    down: torch.Tensor | W4
    """[X * H, F]."""
    gate_up_bias: torch.Tensor | None = None
    """[X * 2F]."""
    down_bias: torch.Tensor | None = None
    """[X * H]."""
    limit: float = 0.0
    """Bias of gate and up, whose activation is then activation.gated's. 0: SiLU."""
    gelu: bool = False
    """GELU in place of SiLU, of floating weights."""
    square: bool = False
    """The activation is the square of a ReLU, and `gate_up` is `up` alone, of floating weights."""

    @property
    def first(self) -> Product:
        """The product with `gate_up`."""
        into = self.down.group if isinstance(self.down, W4) else BLOCK_K
        activation = (self.limit, self.gelu, self.square)
        return Product(self.gate_up, self.gate_up_bias, *activation, into)

    @property
    def second(self) -> Product:
        """The product with `down`."""
        return Product(self.down, self.down_bias)

    @property
    def inner(self) -> int:
        """F."""
        rows = self.gate_up.features_out if isinstance(self.gate_up, W4) else len(self.gate_up)
        return rows // ((2 - self.square) * self.router.stored)


def reference(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Compute [1, T, H] in fp32 of x [T, H], with plain torch."""
    choices = choice.reference(x, experts.router)
    out = torch.zeros(x.shape, device=x.device)
    for expert in choices.ids.unique().tolist():
        rows, column = (choices.ids == expert).nonzero(as_tuple=True)
        gate_up, down = (
            _one(weight, expert, experts.router.stored)
            for weight in (experts.gate_up, experts.down)
        )
        inner = x[rows].float() @ gate_up[:, : x.shape[1]].t()
        if experts.gate_up_bias is not None:
            inner += experts.gate_up_bias.float().view(-1, inner.shape[1])[expert]
        if experts.square:
            output = square_reference(inner[None])
        elif experts.limit:
            output = clamped_reference(inner, experts.limit)
        else:
            output = gated_reference(inner, gelu=experts.gelu)
        output = output @ down.t()
        if experts.down_bias is not None:
            output += experts.down_bias.float().view(-1, output.shape[1])[expert]
        out[rows] += output * choices.weights[rows, column][:, None]
    return out[None]


def _one(weight: torch.Tensor | W4, expert: int, count: int) -> torch.Tensor:
    """The weight of one of `count` experts in fp32."""
    if isinstance(weight, torch.Tensor):
        return weight.view(count, -1, weight.shape[1])[expert].float()
    blocks = weight.features_out // ROWS // count
    own = slice(expert * blocks, (expert + 1) * blocks)
    result = weight._replace(codes=weight.codes[own], scale_zeros=weight.scale_zeros[own])
    return (e2m1.dense if result.e2m1 else dense)(result).float()


def block_rows(pairs: int, experts: int) -> int:
    """Return the rows of a block: about what an expert gets, 16 to 64. Of 128 rows, prompts were slower."""
    return max(16, min(64, power_of_two(round(pairs / experts))))


def apply_few(
    y: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor,
    experts: Experts,
    eps: float,
    y_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add partial sums y [S, T, H] and their bias to the residual fp32 [T, H], and compute the experts of the
    sum's norm.

    Returns parts fp32 [C, T, H], of each choice its weighted result, to be added up; and the sum, which is the
    residual from now on. Up to FEW_ROWS rows.
    """
    router = experts.router
    reader = experts.gate_up if isinstance(experts.gate_up, W4) else None
    rows = choice.add_few(y, residual, gain, router, eps, reader, y_bias)
    choices = rows.choices
    shape = router.choices, *residual.shape
    out = torch.empty(shape, device=residual.device)
    inner = torch.empty(
        choices.ids.numel(), experts.inner, dtype=rows.x.dtype, device=residual.device
    )
    multiply(rows, experts.first, choices, None, inner)
    multiply(inner, experts.second, choices, None, out)
    return out, rows.added


def packed_rows(rows: int, experts: Experts, device: torch.device) -> HalfRows | None:
    """Allocate the int4 activations that `apply_many` reads instead of x. None for other weights."""
    weight = experts.gate_up
    if not isinstance(weight, W4):
        return None
    return HalfRows.empty(rows, weight.features_in, device, "slots", weight.group, factored=False)


def apply_many(x: torch.Tensor, packed: HalfRows | None, experts: Experts) -> torch.Tensor:
    """Compute parts [C, T, H] like `apply_few`, of normed rows x [T, H] in fp16 or bf16.

    `packed`: the same for int4 weights. Parts of a bf16 model are bf16, as a quarter of a prompt's time would
    go into writing and reading fp32.
    """
    router = experts.router
    rows = x.shape[0]
    choices = choice.route(x, router)
    size = block_rows(choices.ids.numel(), router.stored)
    sorted_pairs = blocks.sort(choices.ids, router.stored, size)
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    out = torch.empty(router.choices, rows, x.shape[1], dtype=dtype, device=x.device)
    inner = torch.empty(
        choices.ids.numel(),
        experts.inner,
        dtype=torch.float16 if packed else x.dtype,
        device=x.device,
    )
    if packed is not None:
        x = packed.x
    multiply(x, experts.first, choices, sorted_pairs, inner)
    multiply(inner, experts.second, choices, sorted_pairs, out)
    return out


def multiply(
    x: torch.Tensor | FewRows,
    product: Product,
    choices: Choices,
    sorted_pairs: Blocks | None,
    out: torch.Tensor,
) -> None:
    """Write the product of each pair into `out`; shapes in gemm_float.py.

    Without `sorted_pairs`, of up to FEW_ROWS rows.
    """
    if isinstance(product.weight, torch.Tensor):
        gemm_float.multiply(x, product, choices, sorted_pairs, out)
    elif sorted_pairs is None:
        gemm_int4_few.multiply(x, product, choices, out)
    else:
        assert isinstance(x, torch.Tensor)
        gemm_int4_many.multiply(x, product, choices, sorted_pairs, out)
