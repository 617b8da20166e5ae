"""GEMM with 4-bit weights: chooses the kernel variant and the activation format for a row count.

Letters: M rows, N output and K input features, S splits of K.
"""

from importlib import import_module
from types import ModuleType
from typing import TypeAlias

import torch

from localchat_cuda.kernels import permute_columns
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import gemm_dequant as w4_dequant
from localchat_cuda.kernels.int4 import gemm_e4m3 as w4_e4m3
from localchat_cuda.kernels.int4 import gemm_few as w4_few
from localchat_cuda.kernels.int4 import gemm_tiled as w4_tiled
from localchat_cuda.kernels.int4 import hopper_tile_config
from localchat_cuda.kernels.int4 import tile_config as w4_tile_config
from localchat_cuda.kernels.int4.pack import BLOCK_K, W4, E4M3Copy, dense
from localchat_cuda.kernels.int4.row_norm import RowNorm
from localchat_cuda.kernels.launch import traits

_PACKED_ROWS = 512
_HOPPER_ROWS = 1024
"""Row count from which the library's gemm of dequantized weights is faster.

First token on an H200, packed and dequantized: 512 tokens 16.7 and 17.8 ms, 640 tokens 21.4 and 20.6; with
the Hopper kernel 640 tokens 18.3 and 19.2, 1,024 tokens 25.3 and 26.5.
"""

_UNPACKED_ROWS = 128
"""The same if the unpacked weight is in memory.

A step of 192 rows on an H200 takes 7.1 ms packed and 6.8 unpacked, of 512 12.8 and 11.2, of 768 17.4 and
15.9, of 1,024 22.4 and 20.8.
"""
_E4M3_ROWS = 256
"""Row count of steps with prompts from which the library's gemm of e4m3 copies is faster."""
_NARROW_ROWS = 16
_TILED_FEATURES = 64
"""Multiple of the output features that the kernels need for more rows."""

hopper: ModuleType | None
"""Kernel for Hopper GPUs and large row counts. None if this Triton has no compatible Gluon."""
try:
    hopper = import_module("localchat_cuda.kernels.int4.gemm_hopper")
except ImportError:
    hopper = None

AnyTileConfig: TypeAlias = (
    w4_tile_config.TileConfig | w4_tiled.TiledGemmConfig | hopper_tile_config.HopperTileConfig
)


def packed_rows(device: torch.device, copy: type | None = None, *, prompts: bool = False) -> int:
    """Return the largest row count for which a gemm reads the packed weights themselves.

    copy: type of the unpacked copies in memory, see W4.unpacked. prompts: the step has some.
    """
    if copy is E4M3Copy:
        # The tokens of answers are never rounded in steps of their own.
        if prompts:
            return _E4M3_ROWS
    elif copy is not None:
        return _UNPACKED_ROWS
    fast = hopper is not None and hopper.serves(device)
    return _HOPPER_ROWS if fast else _PACKED_ROWS


def rows_for(weight: W4, max_rows: int) -> int:
    """Return the largest row count for which a gemm reads the packed weight. At most `max_rows`."""
    if weight.features_out % _TILED_FEATURES:
        return min(max_rows, _NARROW_ROWS)
    return max_rows


def tile_config_for(
    rows: int, n: int, k: int, device: torch.device, *, group: int = BLOCK_K, fused: bool = False
) -> AnyTileConfig:
    """Choose the tile config for a weight [N, K] in groups of `group`. Its type selects the kernel.

    fused: the gemm applies act_and_mul to gate and up itself.
    """
    variant = w4_tile_config.variant_for(rows)
    sms = traits(device).sms
    if variant != "tiled":
        return w4_tile_config.tile_config_for(variant, rows, n, k, sms, group)
    if hopper is not None and hopper.serves(device):
        config = hopper_tile_config.tile_config_for(rows, n, k, sms, fused)
        if config is not None:
            return config
    if fused:
        return w4_tiled.fused_tile_config_for(rows, n, group)
    return w4_tiled.tile_config_for(rows, n, k, sms)


def empty_activations(
    m: int, k: int, device: torch.device, group: int = BLOCK_K
) -> w4_activations.Rows:
    """Allocate activations in the format of the variant for `m` rows. ValueError above `packed_rows`.

    group: columns that share a scale in the weight that reads them.
    """
    variant = w4_tile_config.variant_for(m)
    max_rows = packed_rows(device)
    if m > max_rows or variant == "dequant":
        raise ValueError(f"rows: at most {max_rows} wanted, {m} given")
    if variant == "int8":
        return w4_activations.Int8Rows.empty(m, k, device, group)
    order: w4_activations.Order = "lanes" if variant == "fp16" else "slots"
    return w4_activations.HalfRows.empty(m, k, device, order, group, factored=variant != "tiled")


def gemm(
    rows: w4_activations.Rows,
    weight: W4,
    norm: RowNorm | None = None,
) -> torch.Tensor:
    """Compute partial sums fp32 [S, M, N] of activations in the weight's order.

    With `norm`, rows are divided by their rms. Raises ValueError for activations of other groups.
    """
    if rows.group != weight.group or weight.e2m1:
        raise ValueError(f"rows: of groups of {weight.group} wanted, {rows.group} given")
    m = rows.x.shape[0]
    if isinstance(rows, w4_activations.Int8Rows):
        m //= 2
    device = rows.x.device
    n = weight.features_out
    config = tile_config_for(m, n, weight.features_in, device, group=weight.group)
    out = torch.empty(config.splits, m, n, device=device)
    if isinstance(config, w4_tile_config.TileConfig):
        w4_few.gemm(rows, weight, out, config, norm)
    else:
        _gemm_tiled(rows, weight, out, config, norm)
    return out


def _gemm_tiled(
    rows: w4_activations.Rows,
    weight: W4,
    out: torch.Tensor | w4_activations.Rows,
    config: AnyTileConfig,
    norm: RowNorm | None,
    *,
    gelu: bool = False,
) -> None:
    assert isinstance(rows, w4_activations.HalfRows)
    assert not isinstance(out, w4_activations.Int8Rows)
    if isinstance(config, w4_tiled.TiledGemmConfig):
        w4_tiled.gemm(rows, weight, out, config, norm, gelu=gelu)
    else:
        assert hopper is not None
        hopper.gemm(rows, weight, out, config, norm, gelu=gelu)


def gemm_silu_mul(
    rows: w4_activations.Rows,
    weight: W4,
    into: w4_activations.Rows,
    norm: RowNorm | None = None,
    *,
    gelu: bool = False,
    order: torch.Tensor | None = None,
) -> None:
    """Apply act_and_mul to the gemm of gate and up, and write the next gemm's activations.

    `into` [M, N / 2] has its columns in `order`. One kernel where the variant supports that, else two.
    """
    if order is None and w4_tile_config.variant_for(rows.x.shape[0]) == "tiled":
        m = rows.x.shape[0]
        n = weight.features_out
        k = weight.features_in
        config = tile_config_for(m, n, k, rows.x.device, group=weight.group, fused=True)
        _gemm_tiled(rows, weight, into, config, norm, gelu=gelu)
        return
    sums = gemm(rows, weight, norm)
    w4_activations.prepare("act_and_mul", sums, into, gelu=gelu, order=order)


def gemm_of(
    x: torch.Tensor,
    weight: W4,
    *,
    kernels: bool = True,
    wide: bool = False,
    prompts: bool = False,
) -> torch.Tensor:
    """Compute partial sums [S, M, N] of x [M, K], whose columns are in the layer's order.

    fp32 up to `packed_rows`, in x's dtype beyond. wide: fp32 in place of fp16, for what is added to a residual
    and may be beyond the range of fp16. prompts: x may be rounded to e4m3 beyond `packed_rows`.
    """
    m, (n, k), order = x.shape[0], (weight.features_out, weight.features_in), weight.order
    if weight.padding:
        x = torch.nn.functional.pad(x, (0, weight.padding))
    unpacked = weight.unpacked
    max_rows = rows_for(weight, packed_rows(x.device, weight.copy_type, prompts=prompts))
    if kernels and 1 <= m <= max_rows:
        rows = empty_activations(m, k, x.device, weight.group)
        w4_activations.prepare("plain", x[None], rows, order=order)
        return gemm(rows, weight)
    if order is not None:
        x = (permute_columns.gather if kernels else permute_columns.reference)(x, order)
    if not kernels:
        return (x.float() @ dense(weight).t())[None]
    dtype = torch.float32 if wide and x.dtype == torch.float16 else x.dtype
    if isinstance(unpacked, E4M3Copy):
        if prompts and m > _E4M3_ROWS:
            return w4_e4m3.gemm(x, unpacked, dtype)[None]
        unpacked = None
    out = torch.empty(m, n, dtype=dtype, device=x.device)
    if unpacked is None:
        w4_dequant.gemm(x, weight, out)
    else:
        w4_dequant.multiply(x, unpacked, out)
    return out[None]
