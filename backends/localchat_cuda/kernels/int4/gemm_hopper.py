"""W4A16 gemm for 33 to 1,024 rows on Hopper's asynchronous units, in Gluon: y = x w^T.

The same arithmetic as gemm_tiled.py, weights scaled in fp16 before the multiplication, with a program's work
specialized by warp so that its parts overlap:

    one loading warp      copies boxes of x, of packed weights and of their scales with TMA, up to `stages`
                          column blocks of 128 k ahead, into a ring in shared memory; the first weights are
                          loaded before the kernel's predecessor has ended (launch.py: PDL)
    two warpgroups        one or two blocks of 64 features each. Per column block: issue the products of
                          block 0, dequantized before; dequantize block 1 while they run, and issue its
                          products; load the next packed words of block 0 while those run

The weights are the left operand and come from registers, so nothing dequantized is ever written to shared
memory. A warpgroup cannot overlap dequantizing the next block 0 with its own products; those of the other
warpgroup cover it. Each stage has a barrier `full`, which signals that its bytes have arrived, and a barrier
`empty`, which signals that both warpgroups have finished with them.

Tiles are wide because of the L2 cache, not of the tensor cores: for each k, 128 x 128 outputs move 324 bytes
and take 16,384 products, 256 x 128 only 392 for 32,768; and gemm_tiled.py at 512 rows moves the 5.8 TB/s that
L2 has. Their sums, 128 registers a thread, are the most that fits.

Wide tiles are few: gate and up of a 7B model are 148 of them, two rounds on 132 multiprocessors. With `even`
the column blocks of all tiles are divided into runs of one length, a program each. A run is at least a tile
long, so at most two programs share a tile: the second begins with that tile's later column blocks, leaves the
sums in a workspace and sets a flag; the first comes to the tile's first ones last, adds those sums, and clears
the flag. Work is assigned from the last program to the first, so a program only waits for one that was started
before it. (The idea is Stream-K's, Osama et al., 2023.)

Letters: M rows, N output and K input features, G = K / 128, TILE rows of a tile.

    x   fp16 [M, K] in slot order (activations.HalfRows)  out  fp32 [splits, M, N] partial sums
    norm: 1/rms of each row, as in row_norm.py

`gemm_silu_mul` as in gemm_tiled.py. Grid: at most one program per multiprocessor. Accumulation in fp32. Any M.
Compute capability 9 only.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from localchat_cuda.kernels.gluon_compat import (
    TensorDescriptor,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    load_box,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from localchat_cuda.kernels.int4.activations import HalfRows, check_result, check_slot_rows
from localchat_cuda.kernels.int4.hopper_tile_config import HopperTileConfig
from localchat_cuda.kernels.int4.hopper_tile_ops import (
    dequantized,
    finish,
    hand_over,
    item,
    items_here,
    take_over,
)
from localchat_cuda.kernels.int4.pack import W4
from localchat_cuda.kernels.int4.row_norm import RowNorm, norm_arguments
from localchat_cuda.kernels.launch import launch_kernel, traits


class HopperRows(NamedTuple):
    """Constants of the kernel. For the letters see the module docstring."""

    N: int
    K: int
    TILE: int
    BLOCKS: int
    """Blocks of 64 output features of a warpgroup."""
    STAGES: int
    NORM: bool
    """Rows are divided by their rms."""
    FUSED: bool
    """The result is the activation of gate and up; GELU: tanh-GELU, else SiLU."""
    GELU: bool
    PDL: bool
    EVEN: bool
    GROUP: int
    """Columns that share a scale: 32, 64 or 128."""
    INTO: int
    """GROUP of the rows that a fused gemm writes."""


@gluon.jit
def _fetch_weights(w_boxes, s_boxes, ws, ss, bar, stage, column, g, many: gl.constexpr):
    """Load a column block of a tile, 64 features a box; FUSED: of gate and of up in turn."""
    SIDES: gl.constexpr = 1 if many.GROUP == 128 else 64 // many.GROUP + 1
    for q in gl.static_range(2 * many.BLOCKS):
        if many.FUSED:
            row = column * 8 + (q // 2) * 4 + (q % 2) * (many.N // 32)
        else:
            row = column * (8 * many.BLOCKS) + q * 4
        load_box(w_boxes, [row, g * 256], bar, ws.index(stage * (2 * many.BLOCKS) + q))
        if many.GROUP == 128:
            load_box(s_boxes, [row, g * 16], bar, ss.index(stage * (2 * many.BLOCKS) + q))
        else:
            here = (stage * (2 * many.BLOCKS) + q) * SIDES
            for i in gl.static_range(SIDES - 1):
                offset = (g * (SIDES - 1) + i) * 16
                load_box(s_boxes, [row, offset], bar, ss.index(here + i))
            zeros = many.K // 128 * (SIDES - 1) + g * (128 // many.GROUP) // 8
            load_box(s_boxes, [row, zeros * 16], bar, ss.index(here + SIDES - 1))


@gluon.jit
def _load(
    many: gl.constexpr, x_boxes, w_boxes, s_boxes, xs, ws, ss, full, empty, items, tiles, splits
):
    """Loading warp. x is fp16 in two boxes of 64 k, as the shared-memory operand requires."""
    STAGES: gl.constexpr = many.STAGES
    SIDES: gl.constexpr = 1 if many.GROUP == 128 else 64 // many.GROUP + 1
    BYTES: gl.constexpr = many.TILE * 256 + 2 * many.BLOCKS * (4096 + 256 * SIDES)
    ahead = 0
    if many.PDL:
        # Weights depend on no other kernel, so those of the first stages are loaded before the wait.
        _, column, _, first, last = item(0, items, tiles, splits, many)
        for s in gl.static_range(STAGES):
            if first + s < last:
                mbarrier.expect(full.index(s), BYTES)
                _fetch_weights(w_boxes, s_boxes, ws, ss, full.index(s), s, column, first + s, many)
        ahead = gl.minimum(last - first, STAGES)
        gdc_wait()
    iteration = 0
    for i in range(items_here(items, tiles, many)):
        row, column, _, first, last = item(i, items, tiles, splits, many)
        for g in range(first, last):
            stage = iteration % STAGES
            bar = full.index(stage)
            if iteration >= ahead:
                mbarrier.wait(empty.index(stage), ((iteration // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, BYTES)
                _fetch_weights(w_boxes, s_boxes, ws, ss, bar, stage, column, g, many)
            load_box(x_boxes, [row * many.TILE, g * 128], bar, xs.index(stage * 2))
            load_box(x_boxes, [row * many.TILE, g * 128 + 64], bar, xs.index(stage * 2 + 1))
            iteration += 1


@gluon.jit
def _multiply(
    WG: gl.constexpr,
    many: gl.constexpr,
    out,
    work,
    flags,
    squares,
    eps,
    M,
    xs,
    ws,
    ss,
    full,
    empty,
    items,
    tiles,
    splits,
):
    """Compute warpgroup. `lo` and `hi` are the planes of block 0's weights, `lo2` and `hi2` of block 1's.

    All products of a group have ended when the next begins: the compiler would otherwise write weights into
    registers that are still read (gemm_tiled.landed).
    """
    TILE: gl.constexpr = many.TILE
    M_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, M_L, 2)
    Q: gl.constexpr = WG * many.BLOCKS
    if many.PDL:
        # The predecessor may still read the sums, workspace and flags written here, and it writes `squares`.
        # The first bytes of x come after the same wait, so this one costs nothing.
        gdc_wait()
    total = 0
    for i in range(items_here(items, tiles, many)):
        _, _, _, first, last = item(i, items, tiles, splits, many)
        total += last - first
    iteration = 0
    mbarrier.wait(full.index(0), 0)
    # The column block of the weights that are dequantized next: its zeros are one of several runs in a box.
    g = 0
    if many.GROUP != 128:
        _, _, _, g, _ = item(0, items, tiles, splits, many)
    lo, hi = dequantized(ws, ss, Q, g, P_L, many.GROUP)
    for i in range(items_here(items, tiles, many)):
        row, column, split, first, last = item(i, items, tiles, splits, many)
        if many.GROUP != 128:
            _, _, _, later, _ = item(i + 1, items, tiles, splits, many)
        acc = gl.zeros((64, TILE), gl.float32, M_L)
        acc2 = acc
        for g in range(first, last):
            stage = iteration % many.STAGES
            x_lo = xs.index(stage * 2).permute((1, 0))
            x_hi = xs.index(stage * 2 + 1).permute((1, 0))
            now = warpgroup_mma(lo, x_lo, acc, is_async=True)
            now = warpgroup_mma(hi, x_hi, now, is_async=True)
            if many.BLOCKS == 2:
                lo2, hi2 = dequantized(ws, ss, stage * 4 + Q + 1, g, P_L, many.GROUP)
                now2 = warpgroup_mma(lo2, x_lo, acc2, is_async=True)
                now2 = warpgroup_mma(hi2, x_hi, now2, is_async=True)
                acc, lo, hi = warpgroup_mma_wait(2, deps=[now, lo, hi])
            iteration += 1
            following = iteration % many.STAGES
            mbarrier.wait(
                full.index(following), (iteration // many.STAGES) & 1, pred=iteration < total
            )
            g_next = g
            if many.GROUP != 128:
                g_next = gl.where(g + 1 < last, g + 1, later)
            lo_next, hi_next = dequantized(
                ws, ss, following * (2 * many.BLOCKS) + Q, g_next, P_L, many.GROUP
            )
            if many.BLOCKS == 2:
                acc2, lo2, hi2, lo, hi = warpgroup_mma_wait(
                    0, deps=[now2, lo2, hi2, lo_next, hi_next]
                )
            else:
                acc, lo2, hi2, lo, hi = warpgroup_mma_wait(0, deps=[now, lo, hi, lo_next, hi_next])
            barrier()
            mbarrier.arrive(empty.index(stage), count=1)
        if many.EVEN:
            if first > 0:
                hand_over(work, flags, acc, acc2, WG, many, M_L)
            else:
                if last < many.K // 128:
                    acc, acc2 = take_over(work, flags, acc, acc2, WG, many, M_L)
                finish(out, squares, eps, M, acc, acc2, row, column, split, WG, many, M_L)
        else:
            finish(out, squares, eps, M, acc, acc2, row, column, split, WG, many, M_L)


@gluon.jit(do_not_specialize=["M", "items", "tiles", "splits"])
def _hopper_kernel(
    x_boxes,
    w_boxes,
    s_boxes,
    out,
    work,
    flags,
    squares,
    eps,
    M,
    items,
    tiles,
    splits,
    many: gl.constexpr,
):
    TILE: gl.constexpr = many.TILE
    STAGES: gl.constexpr = many.STAGES
    SIDES: gl.constexpr = 1 if many.GROUP == 128 else 64 // many.GROUP + 1
    if many.PDL:
        gdc_launch_dependents()
    X_L: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    F_L: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    xs = gl.allocate_shared_memory(gl.float16, [STAGES * 2, TILE, 64], X_L)
    ws = gl.allocate_shared_memory(gl.int32, [STAGES * 2 * many.BLOCKS, 4, 256], F_L)
    ss = gl.allocate_shared_memory(gl.int32, [STAGES * 2 * many.BLOCKS * SIDES, 4, 16], F_L)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Every barrier is waited for: the compiler would give the memory of an unused one to other data, and when
    # the GPU switches back from another process it writes a barrier's state over that data.
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    barrier()
    # Constants come first: of a sum of tuples, the second may not contain them.
    rings = (xs, ws, ss, full, empty, items, tiles, splits)
    sums = (out, work, flags, squares, eps, M) + rings
    gl.warp_specialize(
        [
            (_multiply, (gl.constexpr(0), many) + sums),
            (_multiply, (gl.constexpr(1), many) + sums),
            (_load, (many, x_boxes, w_boxes, s_boxes) + rings),
        ],
        [4, 1],
        [240, 24],
    )


def serves(device: torch.device) -> bool:
    """Return whether the device has the instructions of this kernel."""
    return traits(device).hopper


class _Workspace:
    """Partial sums that a program passes to its neighbour, with their flags; one per device.

    Large enough for any tile config. CUDA graphs hold the addresses, so it is allocated once and kept.

    Every launch leaves the flags at zero. Launches that use the workspace never overlap: all work of a device
    is one stream, and with PDL a kernel that starts before its predecessor has ended writes nothing before
    `gdc_wait`, which waits for that end.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a first launch with an even tile config must come before a graph's capture"
            )
        places = 2 * traits(device).sms
        self.sums = torch.empty(places * 64 * 2 * 128, device=device)
        self.flags = torch.zeros(places, dtype=torch.int32, device=device)


@lru_cache(maxsize=16)
def _workspace(device: torch.device) -> _Workspace:
    return _Workspace(device)


_BOXES_OF_WEIGHTS = WeakTensorKeyDictionary()
"""TMA descriptors by a weight's codes: 4 us each to make; dropped with the weight."""


def _boxes(weight: W4) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Describe codes and scales of T row blocks as matrices, for boxes of 64 features.

    A launch copies descriptors, which are only addresses and sizes, into its arguments; graphs need none of
    them.
    """
    boxes: tuple[TensorDescriptor, TensorDescriptor] | None = _BOXES_OF_WEIGHTS.get(weight.codes)
    if boxes is None:
        t, g = weight.codes.shape[:2]
        layout = gl.NVMMASharedLayout(0, 32, 2)
        # detached: a view would keep alive the tensor whose release must drop these descriptors
        words = weight.codes.detach().view(torch.int32)
        scale_zeros = weight.scale_zeros.detach()
        line = scale_zeros[0].numel()
        boxes = (
            TensorDescriptor(words.view(t, g * 256), [t, g * 256], [g * 256, 1], [4, 256], layout),
            TensorDescriptor(scale_zeros.view(t, line), [t, line], [line, 1], [4, 16], layout),
        )
        _BOXES_OF_WEIGHTS[weight.codes] = boxes
    return boxes


def gemm(
    rows: HalfRows,
    weight: W4,
    out: torch.Tensor | HalfRows,
    config: HopperTileConfig,
    norm: RowNorm | None = None,
    *,
    gelu: bool = False,
) -> None:
    """Write the partial products, or act_and_mul of gate and up, into `out` as gemm_tiled.gemm."""
    m = rows.x.shape[0]
    k = weight.features_in
    n = weight.features_out
    device = weight.codes.device
    fused = isinstance(out, HalfRows)
    config.check(n, k, fused=fused)
    check_slot_rows(rows, weight)
    target, into = check_result(rows, weight, out, config.splits)
    squares, eps = norm_arguments(norm, m, k, target)
    gpu = traits(device)
    workspace = _workspace(device) if config.even else None
    items = config.items(m, n)
    layout = gl.NVMMASharedLayout(128, 16, 2)
    many = HopperRows(
        N=n,
        K=k,
        TILE=config.rows,
        BLOCKS=config.blocks,
        STAGES=config.stages(fused=fused),
        NORM=norm is not None,
        FUSED=fused,
        GELU=gelu,
        PDL=gpu.pdl,
        EVEN=config.even,
        GROUP=weight.group,
        INTO=into,
    )
    x_boxes = TensorDescriptor(rows.x, [m, k], [k, 1], [config.rows, 64], layout)
    work = (workspace.sums, workspace.flags) if workspace else (target, target)
    tiles = -(-m // config.rows)
    launch_kernel(
        _hopper_kernel,
        (min(items, gpu.sms),),
        *(x_boxes, *_boxes(weight), target, *work, squares, eps),
        *(m, items, tiles, config.splits, many),
        num_warps=4,
        maxnreg=168,
        launch_pdl=gpu.pdl,
    )
