"""Activations and gemms of int4 weights in plain torch, which the kernels are compared with.

Letters: see localchat_cuda/kernels/int4/activations.py.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from localchat_cuda.kernels import ggml, int4, rms_norm_post
from localchat_cuda.kernels.activation import reference as act_and_mul_reference
from localchat_cuda.kernels.int4 import activations
from localchat_cuda.kernels.int4.activations import HalfRows, Int8Rows, Mode, Order, Rows
from localchat_cuda.kernels.int4.pack import BLOCK_K, W4, dense
from localchat_cuda.kernels.int4.row_norm import RowNorm

# a block's 128 columns as (plane, quad, half, pair, h, i), and the axes in each order
_ORDERS: dict[Order, tuple[int, ...]] = {"lanes": (0, 4, 1, 2, 3, 5), "slots": (0, 4, 2, 3, 1, 5)}
_EXTENTS = (2, 4, 2, 2, 2, 2)
_INT16_MOST = 32512.0
"""Largest value of a 16-bit block: 127 * 256, so that rounding never overflows the high byte."""


def _packed_order(values: torch.Tensor, group: int) -> torch.Tensor:
    """Permute [M, K] to the order of packed columns: groups of 32 have half before quad (pack.py)."""
    if group != 32:
        return values
    m, k = values.shape
    return values.reshape(m, k // 64, 2, 4, 8).transpose(2, 3).reshape(m, k)


def ordered(values: torch.Tensor, order: Order, group: int = BLOCK_K) -> torch.Tensor:
    """Permute [M, K] from natural order to `order`."""
    m, k = values.shape
    tile = _packed_order(values, group).view(m, k // BLOCK_K, *_EXTENTS)
    return tile.permute(0, 1, *(2 + axis for axis in _ORDERS[order])).reshape(m, k)


def natural_order(values: torch.Tensor, order: Order, group: int = BLOCK_K) -> torch.Tensor:
    """Invert `ordered`."""
    m, k = values.shape
    axes = _ORDERS[order]
    tile = values.view(m, k // BLOCK_K, *(_EXTENTS[axis] for axis in axes))
    result = tile.permute(0, 1, *(2 + axes.index(axis) for axis in range(6))).reshape(m, k)
    if group != 32:
        return result
    return result.view(m, k // 64, 4, 2, 8).transpose(2, 3).reshape(m, k)


def quantize(values: torch.Tensor, rows: Rows) -> None:
    """Write fp32 values [M, K] to `rows` with plain torch. This is the last part of every mode."""
    m, k = values.shape
    if isinstance(rows, Int8Rows):
        _quantize_int8(values.float(), rows)
        return
    x = values.clamp(-65504.0, 65504.0).to(torch.float16)
    rows.x.copy_(ordered(x, rows.order, rows.group))
    if not rows.factors.shape[2]:
        return
    if rows.group != BLOCK_K:
        rows.factors[0, :, :m] = x.float().view(m, k // rows.group, rows.group).sum(-1).t()
        return
    halves = x.float().view(m, k // BLOCK_K, 2, 64).sum(-1)
    rows.factors[0, :, :m] = halves.sum(-1).t()
    rows.factors[1, :, :m] = -(1024 * halves[..., 0] + 64 * halves[..., 1]).t()


def _ggml_order(values: torch.Tensor) -> torch.Tensor:
    """Permute [M, K], in groups of 16: quad before group, half and pair."""
    m, k = values.shape
    return values.reshape(m, k // 64, 8, 4, 2).transpose(2, 3).reshape(m, k)


def natural_int8(rows: Int8Rows) -> torch.Tensor:
    """Values fp32 [M, K] of rows in groups of 16, in the layer's order."""
    m = rows.x.shape[0] // 2
    k = rows.x.shape[1]
    pair = rows.x.float().view(m, 2, k)
    values = (256.0 * pair[:, 0] + pair[:, 1]).view(m, k // 64, 4, 8, 2)
    scales = rows.factors[:, :m, 0].t().repeat_interleave(BLOCK_K, 1)
    return values.transpose(2, 3).reshape(m, k) * scales


def _quantize_int8(values: torch.Tensor, rows: Int8Rows) -> None:
    m, k = values.shape
    blocks = values.view(m, k // BLOCK_K, BLOCK_K)
    scale = (blocks.abs().amax(-1) / _INT16_MOST).clamp_min(1e-30)
    rounded = torch.floor(blocks / scale[..., None] + 0.5)
    if rows.group == 16:
        stored = _ggml_order(rounded.view(m, k))
        high = torch.floor((stored + 128) / 256)
        pair = torch.stack((high, stored - 256 * high), 1).reshape(2 * m, k)
        rows.x.copy_(pair.to(torch.int8))
        sums = rounded.to(torch.int32).view(m, k // BLOCK_K, 8, 16).sum(-1, dtype=torch.int32)
        both = sums.view(m, k // BLOCK_K, 4, 2).sum(-1, dtype=torch.int32)
        rows.factors[:, :m, 0] = scale.t()
        rows.factors[:, :m, 4:] = torch.cat((both, sums), -1).view(torch.float32).transpose(0, 1)
        return
    stored = _packed_order(rounded.view(m, k), rows.group)
    high = torch.floor((stored + 128) / 256)
    pair = torch.stack((high, stored - 256 * high), 1).view(m, 2, k // 4, 4)
    rows.x.copy_(pair[..., [0, 2, 1, 3]].reshape(2 * m, k).to(torch.int8))
    if rows.group == BLOCK_K:
        sums = torch.stack((scale * rounded.sum(-1), 8 * scale * rounded[..., 64:].sum(-1)), -1)
    else:
        sums = scale[..., None] * rounded.view(m, k // BLOCK_K, -1, rows.group).sum(-1)
    factors = torch.cat((scale[..., None] / 16, sums), -1)
    rows.factors[:, :m, : factors.shape[-1]] = factors.transpose(0, 1)


def prepare(
    mode: Mode,
    source: torch.Tensor,
    rows: Rows,
    *,
    ids: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    factor: float = 1.0,
    eps: float = 0.0,
    gelu: bool = False,
    order: torch.Tensor | None = None,
    peers: None = None,
) -> None:
    """`activations.prepare`, same arguments."""

    def in_order(values: torch.Tensor) -> torch.Tensor:
        return values if order is None else values[:, order.long()]

    k = rows.x.shape[1]
    total = source[ids.long()].float() * factor if ids is not None else source.float().sum(0)
    scale = factor if mode == "norm" else 1.0
    if mode == "act_and_mul":
        quantize(in_order(act_and_mul_reference(total[:, : 2 * k], gelu=gelu)), rows)
        return
    total = total[:, :k]
    if mode == "plain":
        quantize(in_order(total), rows)
        return
    assert residual is not None
    assert weight is not None
    assert squares is not None
    residual.copy_(total if mode == "embed" else residual + total)
    sums = in_order(residual).square().view(residual.shape[0], -1, BLOCK_K).sum(-1)
    squares.copy_(sums * scale**2 + (scale**2 - 1.0) * eps * BLOCK_K)
    quantize(in_order(residual * weight.float() * scale), rows)


def gemm_int8(rows: Int8Rows, weight: W4, norm: RowNorm | None) -> torch.Tensor:
    """Compute the gemm [M, N] in fp32 from the quantized rows, with plain torch."""
    x, factors = rows.x, rows.factors
    m = x.shape[0] // 2
    k = x.shape[1]
    pair = x.view(m, 2, k // 4, 4)[..., [0, 2, 1, 3]].reshape(m, 2, k).float()
    if weight.group == 32:  # half and quad in the order of the layer
        pair = pair.view(m, 2, k // 64, 4, 2, 8).transpose(3, 4).reshape(m, 2, k)
    scale_zeros = 16.0 * factors[:, :m, 0].t().repeat_interleave(BLOCK_K, 1)
    values = (256.0 * pair[:, 0] + pair[:, 1]) * scale_zeros
    if norm is not None:
        values = norm.divided(values)
    return values @ dense(weight).t()


def gemm_fp16(rows: HalfRows, weight: W4, norm: RowNorm | None) -> torch.Tensor:
    """Compute the gemm [M, N] in fp32 from fp16 rows in either order, with plain torch."""
    x = natural_order(rows.x, rows.order, rows.group).float()
    if norm is not None:
        x = norm.divided(x)
    return x @ dense(weight).t()


def prepare_post(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    weight: torch.Tensor,
    rows: Rows,
    squares: torch.Tensor,
    eps: float,
    scale: float = 1.0,
    *,
    order: torch.Tensor | None = None,
) -> None:
    """`rms_norm_post.prepare`, same arguments; its scale is that of the residual itself."""
    total = y.float().sum(0)
    inverse = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    residual.copy_((residual + total * inverse * post.float()) * scale)
    mean = residual.square().mean(-1, keepdim=True).clamp_min(1.0)
    scaled = residual * torch.exp2(-torch.floor(0.5 * torch.log2(mean)))
    if order is not None:
        scaled = scaled[:, order.long()]
        weight = weight[order.long()]
    squares.copy_(scaled.square().view(residual.shape[0], -1, BLOCK_K).sum(-1))
    quantize(scaled * weight.float(), rows)


def gemm(rows: Rows, weight: W4, norm: RowNorm | None = None) -> torch.Tensor:
    """`int4.gemm`, same arguments."""
    if isinstance(rows, Int8Rows):
        return gemm_int8(rows, weight, norm)[None]
    return gemm_fp16(rows, weight, norm)[None]


def gemm_silu_mul(
    rows: Rows,
    weight: W4,
    into: Rows,
    norm: RowNorm | None = None,
    *,
    gelu: bool = False,
    order: torch.Tensor | None = None,
) -> None:
    """`int4.gemm_silu_mul`, same arguments."""
    prepare("act_and_mul", gemm(rows, weight, norm), into, gelu=gelu, order=order)


def gemm_rows(rows: Int8Rows, weight: ggml.GgmlWeight, norm: RowNorm | None = None) -> torch.Tensor:
    """`ggml.gemm_rows`, same arguments."""
    x = natural_int8(rows)
    if norm is not None:
        x = norm.divided(x)
    return (x @ ggml.dense(weight).t())[None]


@contextmanager
def in_place_of_kernels() -> Iterator[None]:
    """Make packed layers compute with these functions. Threads share it, so one of them enters it for all."""
    if int4.gemm is gemm:
        yield
        return
    with ExitStack() as stack:
        for module, name, function in (
            (int4, "gemm", gemm),
            (int4, "gemm_silu_mul", gemm_silu_mul),
            (ggml, "gemm_rows", gemm_rows),
            (activations, "prepare", prepare),
            (rms_norm_post, "prepare", prepare_post),
        ):
            stack.enter_context(mock.patch.object(module, name, function))
        yield
