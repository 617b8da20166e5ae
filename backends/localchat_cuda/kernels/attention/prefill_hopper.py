"""Prefill attention on Hopper's asynchronous units: prefill.py's computation, warp-specialized.

Letters as in reference.py; M = 64 queries per warpgroup, 2M per tile, 2P keys per step (two pages).

A program of prefill.py works sequentially: it copies keys, multiplies, takes exponentials, multiplies again. On
an H200 the exponentials take half as long as the matrix products, and tiles of 64 queries read every key so
often that L2 bandwidth is exhausted. Here a program has three roles that run at once:

    one loading warp     copies boxes [P, D] of keys and values with TMA, straight from the pages, up to STAGES
                         steps ahead, into a ring in shared memory
    two warpgroups       64 queries each, held in registers, over the same keys. A step issues the products of
                         queries and new keys, then those of the last step's weights and values, and takes the
                         exponentials of the former while the latter run.

Each stage has a barrier `full`, which signals that its bytes have arrived, and a barrier `empty`, which signals
that both warpgroups have finished with them. A step is the keys of these pages with the values of the previous
step, so that one pair of barriers serves both. Steps go from the newest keys to the oldest: those that need
masks come first (and last, with a window), and those before the window of all queries are skipped.

Grid: at most one program per multiprocessor. Items are (tile, head), longest first; programs take them in
rounds of alternating direction. An item of a sequence without new tokens is skipped. fp32 accumulation, exp2
with the scale folded in. Not supported: soft caps and heads of 256 columns (registers spill), pages of other
than 64 tokens, FP8 pages.

FlashAttention-3 (Shah et al., 2024): the roles and the order of products; block tables as in vLLM's Triton
attention.
"""

from typing import NamedTuple

import torch

from localchat_cuda.kernels.attention.decode import LOG2E
from localchat_cuda.kernels.attention.reference import AttentionBatch, Rules
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
from localchat_cuda.kernels.launch import launch_kernel, tensor_or, traits

ROWS = 128
KEYS = 128
WARPS = 12
STAGES = 3
"""Queries per tile, keys per step, warps, and steps in flight.

The warps include three idle ones of the loading warpgroup.
"""
PAGE = KEYS // 2
_DIMENSIONS = (64, 128)
_HALVES = (torch.float16, torch.bfloat16)
_ROWS_OF_BOX = 128  # bytes that TMA swizzles, so that reads of columns are free of bank conflicts


class HopperShape(NamedTuple):
    """Constants of the kernel. For the letters see reference.py."""

    H: int
    J: int
    D: int
    P: int
    M: int
    """Queries of a warpgroup."""
    STAGES: int
    WINDOW: int
    SUNK: bool


@gluon.jit
def _rounds(items):
    """Count the items of this program."""
    grid = gl.num_programs(0)
    lane = gl.program_id(0)
    full_rounds = items // grid
    index = gl.where(full_rounds % 2 == 0, lane, grid - 1 - lane)
    return full_rounds + gl.where(index < items % grid, 1, 0)


@gluon.jit
def _item(round_index, tiles, counts, lengths, shape: gl.constexpr, STEP: gl.constexpr):
    """Find the work of a round: tile, head and steps `low` to `end`.

    No steps for a sequence without new tokens. Rounds alternate direction over the programs, so that none
    always has the longer items.
    """
    grid = gl.num_programs(0)
    lane = gl.program_id(0)
    item = round_index * grid + gl.where(round_index % 2 == 0, lane, grid - 1 - lane)
    sequence = gl.load(tiles + item // shape.H * 2)
    first = gl.load(tiles + item // shape.H * 2 + 1)
    count = gl.load(counts + sequence)
    length = gl.load(lengths + sequence)
    before = length - count + first
    end = gl.where(first < count, gl.cdiv(gl.minimum(before + 2 * shape.M, length), STEP), 0)
    low = end * 0
    if shape.WINDOW > 0:
        low = gl.minimum(gl.maximum(before - shape.WINDOW + 1, 0) // STEP, end)
    return item % shape.H, sequence, first, count, length, low, end


@gluon.jit
def _pages(table, step, first_page, last_page, rows_a_page):
    """First rows of a step's two pages. Before the first and past the last page it repeats that page: its keys
    are masked there, and the table may name any page."""
    low_page = gl.load(table + gl.maximum(step * 2, first_page)) * rows_a_page
    other = gl.load(table + gl.minimum(step * 2 + 1, last_page)) * rows_a_page
    return low_page, other


@gluon.jit
def _fetch(boxes, row, low_page, other, buffers, stage, full):
    load_box(boxes, [row + low_page, 0], full.index(stage), buffers.index(stage * 2))
    load_box(boxes, [row + other, 0], full.index(stage), buffers.index(stage * 2 + 1))


@gluon.jit
def _load(shape: gl.constexpr, k_boxes, v_boxes, rings, queue, pages, items, rows_a_page):
    """Loading warp: for each item its keys, newest first, and each step's values one step later."""
    STAGES: gl.constexpr = shape.STAGES
    ks, vs, full, empty = rings
    tiles, counts, lengths = queue
    slots, tables, width = pages
    BYTES: gl.constexpr = 2 * shape.P * shape.D * 2
    base = 0
    for round_index in range(_rounds(items)):
        head, sequence, first, count, length, low, end = _item(
            round_index, tiles, counts, lengths, shape, 2 * shape.P
        )
        if low < end:
            table = tables + gl.load(slots + sequence).to(gl.int64) * width
            last_page = (
                gl.cdiv(gl.minimum(length - count + first + 2 * shape.M, length), shape.P) - 1
            )
            first_page = last_page * 0
            if shape.WINDOW > 0:
                first_page = gl.maximum(length - count + first - shape.WINDOW + 1, 0) // shape.P
            row = head // (shape.H // shape.J) * shape.P
            low_page, other = _pages(table, end - 1, first_page, last_page, rows_a_page)
            stage = base % STAGES
            mbarrier.wait(empty.index(stage), ((base // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            _fetch(k_boxes, row, low_page, other, ks, stage, full)
            for iteration in range(1, end - low):
                next_low_page, next_other = _pages(
                    table, end - 1 - iteration, first_page, last_page, rows_a_page
                )
                stage = (base + iteration) % STAGES
                mbarrier.wait(empty.index(stage), (((base + iteration) // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), 2 * BYTES)
                _fetch(k_boxes, row, next_low_page, next_other, ks, stage, full)
                _fetch(v_boxes, row, low_page, other, vs, stage, full)
                low_page = next_low_page
                other = next_other
            base += end - low
            stage = base % STAGES
            mbarrier.wait(empty.index(stage), ((base // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            _fetch(v_boxes, row, low_page, other, vs, stage, full)
            base += 1


@gluon.jit
def _seen(s, key, position, length):
    return gl.where((key[None, :] <= position[:, None]) & (key < length)[None, :], s, float("-inf"))


@gluon.jit
def _kept(s, end, position):
    """Mark keys inside the query's window."""
    return gl.where(end[None, :] > position[:, None], s, float("-inf"))


@gluon.jit
def _weigh(s, t, peak, mass, factor):
    """Compute an online softmax step: (weights, weights, peak, mass, decay of earlier sums)."""
    higher = gl.maximum(peak, gl.max(gl.maximum(s, t), 1))
    anchor = gl.where(higher == float("-inf"), 0.0, higher) * factor
    decay = gl.exp2(peak * factor - anchor)
    w = gl.exp2(s * factor - anchor[:, None])
    x = gl.exp2(t * factor - anchor[:, None])
    return w, x, higher, mass * decay + gl.sum(w + x, 1), decay


@gluon.jit
def _without_rest(values, key, length, P: gl.constexpr, B_L: gl.constexpr):
    """Zero values past the length: they may be NaN, and 0 * NaN is NaN."""
    row = key + gl.arange(0, P, gl.SliceLayout(1, B_L))
    values.store(gl.where((row < length)[:, None], values.load(B_L), 0.0))


@gluon.jit
def _attend(q, out, rings, sinks, start, item, base, factor, WG: gl.constexpr, shape: gl.constexpr):
    """Compute rows WG * M and on of an item, in one warpgroup. `base` continues step numbers across items."""
    P: gl.constexpr = shape.P
    D: gl.constexpr = shape.D
    M: gl.constexpr = shape.M
    STAGES: gl.constexpr = shape.STAGES
    WINDOW: gl.constexpr = shape.WINDOW
    ks, vs, full, empty = rings
    head, _, first, count, length, low, end = item
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, P, 16])
    A_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(0, A_L, 2)
    Q_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 2)
    B_L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q.dtype.element_ty
    begin = first + WG * M
    row = begin + gl.arange(0, M, gl.SliceLayout(1, B_L))
    column = gl.arange(0, D, gl.SliceLayout(0, B_L))
    q_at = ((start + row).to(gl.int64) * shape.H + head)[:, None] * D + column[None, :]
    valid = (row < count)[:, None]
    query = gl.convert_layout(gl.load(q + q_at, mask=valid, other=0.0), Q_L)
    before = length - count + begin
    position = before + gl.arange(0, M, gl.SliceLayout(1, S_L))
    n = gl.arange(0, P, gl.SliceLayout(0, S_L))
    clear = (before + 1) // (2 * P)
    edge = 0
    if WINDOW > 0:
        edge = gl.cdiv(gl.maximum(before + M - WINDOW, 0), 2 * P)
    zero = gl.zeros((M, P), gl.float32, S_L)
    acc = gl.zeros((M, D), gl.float32, A_L)
    mass = gl.zeros((M,), gl.float32, gl.SliceLayout(1, S_L))
    peak = gl.full((M,), float("-inf"), gl.float32, gl.SliceLayout(1, S_L))
    # the newest keys always need masks
    key = (end - 1) * (2 * P) + n
    stage = base % STAGES
    mbarrier.wait(full.index(stage), (base // STAGES) & 1)
    s_run = warpgroup_mma(
        query, ks.index(stage * 2).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    t_run = warpgroup_mma(
        query, ks.index(stage * 2 + 1).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    s, t, query = warpgroup_mma_wait(0, deps=[s_run, t_run, query])
    barrier()
    mbarrier.arrive(empty.index(stage), count=1)
    s = _seen(s, key, position, length)
    t = _seen(t, key + P, position, length)
    if WINDOW > 0:
        s = _kept(s, key + WINDOW, position)
        t = _kept(t, key + (P + WINDOW), position)
    w, x, peak, mass, decay = _weigh(s, t, peak, mass, factor)
    p = gl.convert_layout(w.to(dtype), P_L)
    r = gl.convert_layout(x.to(dtype), P_L)
    if end * (2 * P) > length:
        # both warpgroups write the same values
        stage = (base + 1) % STAGES
        mbarrier.wait(full.index(stage), ((base + 1) // STAGES) & 1)
        key_start = (end - 1) * (2 * P)
        if WINDOW > 0:
            # where the first page lies before the window, its place holds the second one
            key_start = gl.maximum(
                key_start, gl.maximum(length - count + first - WINDOW + 1, 0) // P * P
            )
        _without_rest(vs.index(stage * 2), key_start, length, P, B_L)
        _without_rest(vs.index(stage * 2 + 1), (end - 1) * (2 * P) + P, length, P, B_L)
        fence_async_shared()
        barrier()
    for iteration in range(1, end - low):
        step = end - 1 - iteration
        stage = (base + iteration) % STAGES
        mbarrier.wait(full.index(stage), ((base + iteration) // STAGES) & 1)
        s_run = warpgroup_mma(
            query, ks.index(stage * 2).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        t_run = warpgroup_mma(
            query, ks.index(stage * 2 + 1).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        acc_run = warpgroup_mma(p, vs.index(stage * 2), acc, is_async=True)
        acc_run = warpgroup_mma(r, vs.index(stage * 2 + 1), acc_run, is_async=True)
        s, t, query = warpgroup_mma_wait(2, deps=[s_run, t_run, query])
        if step >= clear:
            key = step * (2 * P) + n
            s = _seen(s, key, position, length)
            t = _seen(t, key + P, position, length)
        if WINDOW > 0:  # noqa: SIM102 (a constant: no branch in the kernel)
            if step < edge:
                key = step * (2 * P) + WINDOW + n
                s = _kept(s, key, position)
                t = _kept(t, key + P, position)
        w, x, peak, mass, decay = _weigh(s, t, peak, mass, factor)
        r_next = gl.convert_layout(x.to(dtype), P_L)
        p_next = gl.convert_layout(w.to(dtype), P_L)
        acc, p, r = warpgroup_mma_wait(0, deps=[acc_run, p, r])
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, A_L))[:, None]
        p = p_next
        r = r_next
    last = base + end - low
    stage = last % STAGES
    mbarrier.wait(full.index(stage), (last // STAGES) & 1)
    acc_run = warpgroup_mma(p, vs.index(stage * 2), acc, is_async=True)
    acc_run = warpgroup_mma(r, vs.index(stage * 2 + 1), acc_run, is_async=True)
    if shape.SUNK:
        sink = gl.load(sinks + head).to(gl.float32) * 1.4426950408889634  # log2(e)
        mass += gl.exp2(sink - peak * factor)
    mass = gl.where(mass == 0.0, 1.0, mass)
    shrink = gl.convert_layout(1.0 / mass, gl.SliceLayout(1, A_L))
    acc, p, r = warpgroup_mma_wait(0, deps=[acc_run, p, r])
    barrier()
    mbarrier.arrive(empty.index(stage), count=1)
    done = gl.convert_layout((acc * shrink[:, None]).to(out.dtype.element_ty), B_L)
    gl.store(out + q_at, done, mask=valid)


@gluon.jit
def _consume(WG: gl.constexpr, shape: gl.constexpr, q, out, rings, sinks, queue, items, factor):
    tiles, starts, counts, lengths = queue
    base = 0
    for round_index in range(_rounds(items)):
        item = _item(round_index, tiles, counts, lengths, shape, 2 * shape.P)
        _, sequence, _, _, _, low, end = item
        if low < end:
            start = gl.load(starts + sequence)
            _attend(q, out, rings, sinks, start, item, base, factor, WG, shape)
            base += end - low + 1


@gluon.jit(do_not_specialize=["width", "items"])
def _hopper_kernel(
    q,
    k_boxes,
    v_boxes,
    out,
    sinks,
    tiles,
    batch,
    factor,
    width,
    rows_a_page,
    items,
    shape: gl.constexpr,
):
    P: gl.constexpr = shape.P
    D: gl.constexpr = shape.D
    STAGES: gl.constexpr = shape.STAGES
    T_L: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ks = gl.allocate_shared_memory(k_boxes.dtype, [STAGES * 2, P, D], T_L)
    vs = gl.allocate_shared_memory(k_boxes.dtype, [STAGES * 2, P, D], T_L)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    barrier()
    # Constants come first: of a sum of tuples, the second may not contain them.
    rings = (ks, vs, full, empty)
    queue = (tiles, batch.starts, batch.counts, batch.lengths)
    work = (q, out, rings, sinks, queue, items, factor)
    lengths = (tiles, batch.counts, batch.lengths)
    pages = (batch.slots, batch.tables, width)
    loaded = (k_boxes, v_boxes, rings, lengths, pages, items, rows_a_page)
    gl.warp_specialize(
        [
            (_consume, (gl.constexpr(0), shape) + work),
            (_consume, (gl.constexpr(1), shape) + work),
            (_load, (shape,) + loaded),
        ],
        [4, 1],
        [240, 24],
    )


def serves(device: torch.device, dtype: torch.dtype, d: int, page: int, soft_cap: float) -> bool:
    """Return whether this kernel supports the device, dtype, head dimension, page size and soft cap."""
    fits = d in _DIMENSIONS and dtype in _HALVES and page == PAGE and not soft_cap
    return fits and traits(device).hopper


def _boxes(pages: torch.Tensor) -> TensorDescriptor:
    """Describe pages [pages, J, P, D] as rows [.., D] for boxes of a page.

    The launch copies the descriptor, which is only an address and sizes, into its arguments.
    """
    count, heads, page, d = pages.shape
    rows = (count - 1) * (pages.stride(0) // d) + heads * page
    layout = gl.NVMMASharedLayout(_ROWS_OF_BOX, 16, 2)
    return TensorDescriptor(pages, [rows, d], [d, 1], [page, d], layout)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: AttentionBatch,
    tiles: torch.Tensor,
    out: torch.Tensor,
    rules: Rules,
) -> None:
    """Compute attention in tiles of ROWS queries.

    prefill.attend has checked the arguments, and `serves` is True.
    """
    _, h, d = q.shape
    items = tiles.shape[0] * h
    constants = (rules.window, rules.sinks is not None)
    shape = HopperShape(h, k.shape[1], d, PAGE, ROWS // 2, STAGES, *constants)
    scale = rules.scale_for(d) * LOG2E.value
    launch_kernel(
        _hopper_kernel,
        (min(items, traits(q.device).sms),),
        *(q, _boxes(k), _boxes(v), out, tensor_or(rules.sinks, out), tiles, batch, scale),
        *(batch.tables.shape[1], k.stride(0) // d, items, shape),
        num_warps=4,
        maxnreg=168,
    )
