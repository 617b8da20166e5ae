"""W8A16 gemm for 1 to 32 rows: y = x w^T with 8-bit weights.

The weights are loaded once, straight into tensor-core operands: no shared memory in the loop, no special order
of the weights in memory.

Letters: M rows, N output and K input features, S splits of K, G = K / 128.

    x    fp16 or bf16 [M, K] (in the interpreter also fp32)    pack.W8 of N x K, K in 128s
    out  fp32 [S, M, N] partial sums, which the next operation adds up

A sum over k does not depend on the order of k. A lane of `mma` holds four neighbours in k, then the
four 16 further, and so on; here a lane loads 16 codes that are neighbours in memory in place of those,
and loads x by the same rule: two loads of 16 bytes. Rows are padded to 8, 16 or 32 by repeating valid ones, so
that 1 to 8 rows cost the same.

One warp owns `blocks` times 16 output features and 128 input features at a time; the `warps` of a program take
neighbouring parts of K and add up at the end. Grid (N / (16 * blocks), S). Row scales multiply the result,
block scales the sum of each 128, those of MXFP8 the weights, exactly. Accumulation in fp32. The only rounding
is that of x to its own type. With PDL the first chunk of weights is loaded before the kernel waits for x. Not
supported: more than 32 rows; tile_config.py chooses the variant for 9 to 32.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.fp8_int8.pack import BLOCK, MX_GROUP, W8, dense
from localchat_cuda.kernels.fp8_int8.tile_config import W8TileConfig
from localchat_cuda.kernels.fp8_int8.tile_ops import W8Shape, decode, decode_mx, mx_factor
from localchat_cuda.kernels.launch import (
    KernelLaunch,
    cdiv,
    power_of_two,
    release,
    require,
    traits,
    wait,
)

MAX_ROWS = 32


def reference(x: torch.Tensor, weight: W8) -> torch.Tensor:
    """Compute the gemm [M, N] in fp32 with plain torch."""
    return x.float() @ dense(weight).t()


@triton.jit
def _load(codes, first, shape: tl.constexpr, WARPS: tl.constexpr):
    """Load 16 rows x 64 columns for each warp, warps 128 columns apart: uint8 [WARPS * 1024]."""
    N: tl.constexpr = shape.N
    K: tl.constexpr = shape.K
    i = tl.arange(0, WARPS * 1024)
    row = first + i // 64 % 8 + i // (512 * WARPS) * 8
    if N % 16 != 0:
        row = tl.minimum(row, N - 1)
    offset = row * K + i // 512 % WARPS * 128 + i % 64
    return tl.load(codes + offset, eviction_policy="evict_first")


@triton.jit
def _left(w, WARPS: tl.constexpr):
    """Arrange those codes as a left operand [WARPS, 16, 64].

    Bytes of a lane are (half, pair of fours, four).
    """
    w = tl.permute(tl.reshape(w, (2, WARPS, 8, 4, 2, 2, 4)), (1, 0, 2, 4, 5, 3, 6))
    return tl.reshape(w, (WARPS, 16, 64))


@triton.jit
def _right(x, first, M, K: tl.constexpr, WARPS: tl.constexpr):
    """Load eight rows of x as a right operand [WARPS, 64, 8].

    The order of k is the same.
    """
    j = tl.arange(0, 32)
    k = j // 8 * 16 + j % 8
    m = (first + tl.arange(0, 8)) % M
    warp = tl.arange(0, WARPS)
    pointers = x + m[:, None, None] * K + warp[None, :, None] * 128 + k[None, None, :]
    tile = tl.join(tl.load(pointers), tl.load(pointers + 8))
    tile = tl.permute(tl.reshape(tile, (8, WARPS, 4, 2, 4, 2)), (1, 5, 3, 2, 4, 0))
    return tl.reshape(tile, (WARPS, 64, 8))


@triton.jit
def _exponents(scales, first, shape: tl.constexpr, WARPS: tl.constexpr):
    """Load the exponent of each 16 codes of `_load`: int32 [WARPS * 64]. `scales`: bytes."""
    i = tl.arange(0, WARPS * 64)
    row = first + i // 4 % 8 + i // (32 * WARPS) * 8
    if shape.N % 16 != 0:
        row = tl.minimum(row, shape.N - 1)
    return tl.load(scales + row * (shape.K // 32) + i // 32 % WARPS * 4 + i % 4 // 2).to(tl.int32)


@triton.jit
def _mx_chunk(codes, scales, first, chunk, shape: tl.constexpr, tile: tl.constexpr):
    """Load two halves of a chunk of MXFP8 for each block, and their exponents."""
    BLOCKS: tl.constexpr = tile.blocks
    WARPS: tl.constexpr = tile.warps
    codes += chunk * (128 * WARPS)
    exponents = scales.to(tl.pointer_type(tl.uint8)) + chunk * (4 * WARPS)
    result = ()
    for b in tl.static_range(BLOCKS):
        row = first + 16 * b
        for half in tl.static_range(2):
            result = result + (_load(codes + 64 * half, row, shape, WARPS),)
            result = result + (_exponents(exponents + 2 * half, row, shape, WARPS),)
    return result


@triton.jit
def _mx_left(w, exponents, like, shape: tl.constexpr, WARPS: tl.constexpr):
    """Decode codes of `_load` with their powers of two, as a left operand."""
    factors = tl.broadcast_to(mx_factor(exponents)[:, None], (WARPS * 64, 16))
    w = decode_mx(tl.reshape(w, (WARPS * 64, 16)), factors, like, shape.DECODER, True)
    return _left(tl.reshape(w, (WARPS * 1024,)), WARPS)


@triton.jit
def _half_chunks(codes, first, shape: tl.constexpr, tile: tl.constexpr):
    """Load two halves of a chunk for each block."""
    BLOCKS: tl.constexpr = tile.blocks
    result = ()
    for b in tl.static_range(BLOCKS):
        row = first + 16 * b
        low = _load(codes, row, shape, tile.warps)
        result = result + (low, _load(codes + 64, row, shape, tile.warps))
    return result


@triton.jit
def _chunk(codes, scales, first, chunk, shape: tl.constexpr, tile: tl.constexpr):
    """Load what `_multiply` reads of a chunk."""
    if shape.MX:
        return _mx_chunk(codes, scales, first, chunk, shape, tile)
    else:
        return _half_chunks(codes + chunk * (128 * tile.warps), first, shape, tile)


@triton.jit
def _scale(scales, row, chunk, G: tl.constexpr, WARPS: tl.constexpr):
    """Load the scale of the 128 x 128 block in which a warp's chunk lies."""
    pointer = scales + row // 128 * G + chunk * WARPS
    return tl.load(pointer + tl.arange(0, WARPS))[:, None, None]


@triton.jit
def _multiply(
    sums,
    ws,
    x,
    scales,
    first,
    chunk,
    M,
    shape: tl.constexpr,
    tile: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Add the products of a chunk, which `_chunk` has loaded."""
    K: tl.constexpr = shape.K
    BLOCKS: tl.constexpr = tile.blocks
    WARPS: tl.constexpr = tile.warps
    like = x.dtype.element_ty
    xs = ()
    for p in tl.static_range(PARTS):
        pointer = x + chunk * (128 * WARPS)
        xs = xs + (_right(pointer, 8 * p, M, K, WARPS), _right(pointer + 64, 8 * p, M, K, WARPS))
    result = ()
    for b in tl.static_range(BLOCKS):
        if shape.MX:
            low = _mx_left(ws[4 * b], ws[4 * b + 1], like, shape, WARPS)
            high = _mx_left(ws[4 * b + 2], ws[4 * b + 3], like, shape, WARPS)
        else:
            low = _left(decode(ws[2 * b], like, shape.WHOLE, shape.DECODER, True), WARPS)
            high = _left(decode(ws[2 * b + 1], like, shape.WHOLE, shape.DECODER, True), WARPS)
        for p in tl.static_range(PARTS):
            total = sums[b * PARTS + p]
            if shape.SHARED:
                part = tl.dot(low, xs[2 * p], input_precision="ieee")
                part = tl.dot(high, xs[2 * p + 1], part, input_precision="ieee")
                total += part * _scale(scales, first + 16 * b, chunk, K // 128, WARPS)
            else:
                total = tl.dot(low, xs[2 * p], total, input_precision="ieee")
                total = tl.dot(high, xs[2 * p + 1], total, input_precision="ieee")
            result = result + (total,)
    return result


@triton.jit(do_not_specialize=["M"])
def _small_kernel(
    x,
    codes,
    scales,
    out,
    M,
    shape: tl.constexpr,
    tile: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    N: tl.constexpr = shape.N
    BLOCKS: tl.constexpr = tile.blocks
    WARPS: tl.constexpr = tile.warps
    release(PDL)
    CHUNKS: tl.constexpr = shape.K // (128 * WARPS)
    first = tl.program_id(0).to(tl.int64) * (16 * BLOCKS)
    split = tl.program_id(1)
    low = split * CHUNKS // tile.splits
    high = (split + 1) * CHUNKS // tile.splits
    ws = _chunk(codes, scales, first, low, shape, tile)
    sums = ()
    for _ in tl.static_range(BLOCKS * PARTS):
        sums = sums + (tl.zeros((WARPS, 16, 8), tl.float32),)
    wait(PDL)
    sums = _multiply(sums, ws, x, scales, first, low, M, shape, tile, PARTS)
    for c in tl.range(low + 1, high, 1, num_stages=1):
        more = _chunk(codes, scales, first, c, shape, tile)
        sums = _multiply(sums, more, x, scales, first, c, M, shape, tile, PARTS)
    for b in tl.static_range(BLOCKS):
        n = first + 16 * b + tl.arange(0, 16)
        gain = 1.0
        if not shape.SHARED and not shape.MX:
            gain = tl.load(scales + n, mask=n < N, other=0.0)[:, None]
        for p in tl.static_range(PARTS):
            y = tl.sum(sums[b * PARTS + p], 0)
            m = 8 * p + tl.arange(0, 8)
            offsets = (split * M + m).to(tl.int64)[None, :] * N + n[:, None]
            tl.store(out + offsets, y * gain, mask=(m < M)[None, :] & (n < N)[:, None])


def check(x: torch.Tensor, weight: W8, out: torch.Tensor, splits: int, *, max_rows: int) -> None:
    """Raise ValueError unless the tensors fit each other and the variant.

    The variant takes up to `max_rows` rows.
    """
    m, (n, k), device = x.shape[0], weight.codes.shape, weight.codes.device
    if not 1 <= m <= max_rows:
        raise ValueError(f"x: 1 to {max_rows} rows wanted, {m} given")
    if k % BLOCK:
        raise ValueError(f"weight.codes: input features in {BLOCK}s wanted, {k} given")
    scale_shape: tuple[int, ...] = (n,)
    scale_dtype = torch.float32
    if weight.blocks:
        scale_shape = -(-n // BLOCK), k // BLOCK
    elif weight.mx:
        scale_shape = n, k // MX_GROUP
        scale_dtype = torch.uint8
    if weight.mx and x.dtype == torch.float16:
        raise ValueError("x: bf16 wanted with MXFP8, fp16 given")
    require("x", x, (m, k), device)
    require("weight.codes", weight.raw, (n, k), device, torch.uint8)
    require("weight.scales", weight.scales, scale_shape, device, scale_dtype)
    require("out", out, (splits, m, n), device, torch.float32)


def gemm(
    x: torch.Tensor,
    weight: W8,
    out: torch.Tensor,
    config: W8TileConfig,
    *,
    decoder: int,
) -> None:
    """Write the partial sums into `out` [S, M, N]; `decoder` as in tile_ops.py."""
    check(x, weight, out, config.splits, max_rows=MAX_ROWS)
    m, (n, k) = x.shape[0], weight.codes.shape
    config.check(n, k)
    grid = (cdiv(n, 16 * config.blocks), config.splits)
    gpu = traits(weight.codes.device)
    KernelLaunch(_small_kernel, grid, gpu, config.warps, config.registers, rows=1).run(
        *(x, weight.raw, weight.words, out, m, W8Shape.of(weight, decoder), config),
        PARTS=power_of_two(m) // 8 if m > 8 else 1,
    )
