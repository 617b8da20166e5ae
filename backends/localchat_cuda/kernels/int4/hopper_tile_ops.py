"""Device functions of gemm_hopper.py: work assignment, unpacking of weights, and storing of a tile's sums.

Letters as there. M_L is the layout of a warpgroup's sums, P_L that of its left operand in registers.
"""

import triton

from localchat_cuda.kernels.gluon_compat import barrier, gl, gluon
from localchat_cuda.kernels.int4.tile_ops import PLANES_ASM, SCALED_ASM


@gluon.jit
def items_here(items, tiles, many: gl.constexpr):
    """Count this program's pieces of work; at least one."""
    grid = gl.num_programs(0)
    lane = gl.program_id(0)
    if many.EVEN:
        G: gl.constexpr = many.K // 128
        c = grid - 1 - lane
        begin = c * (items * G) // grid
        end = (c + 1) * (items * G) // grid
        return (end + G - 1) // G - begin // G
    else:
        return (items - lane + grid - 1) // grid


@gluon.jit
def item(i, items, tiles, splits, many: gl.constexpr):
    """Find piece i of this program: row tile, column tile, split, first group, one past the last.

    Row tiles run fastest, so that neighbouring programs share weights in the L2 cache. EVEN: from the last
    program to the first, so that a program waits only for those that started before it.
    """
    G: gl.constexpr = many.K // 128
    COLUMNS: gl.constexpr = many.N // (128 * many.BLOCKS)
    grid = gl.num_programs(0)
    lane = gl.program_id(0)
    if many.EVEN:
        c = grid - 1 - lane
        begin = c * (items * G) // grid
        end = (c + 1) * (items * G) // grid
        tile = begin // G + i
        first = gl.maximum(begin - tile * G, 0)
        last = gl.minimum(end - tile * G, G)
        return tile % tiles, tile // tiles, 0, first, last
    else:
        index = lane + i * grid
        split = index // (tiles * COLUMNS)
        first = split * G // splits
        return index % tiles, index // tiles % COLUMNS, split, first, (split + 1) * G // splits


@gluon.jit
def _scaled(w, zero, scale):
    """Unpack int16 of two bytes to four fp16 weights, as in gemm_tiled.py."""
    return gl.inline_asm_elementwise(
        SCALED_ASM,
        "=&r,=&r,=&r,=&r,r,r,r",
        [w, zero, scale],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _scaled_planes(w, zero, scale, zero_high, scale_high):
    """`_scaled` with a zero and a scale for low nibbles, and others for high nibbles."""
    return gl.inline_asm_elementwise(
        PLANES_ASM,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [w, zero, scale, zero_high, scale_high],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _features(stored, index, P_L: gl.constexpr):
    """Load a word for each of 64 features, as each thread needs them."""
    S_L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 8]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0]], [], [4, 16]
    )
    words = gl.reshape(stored.index(index).load(S_L), (64,))
    return gl.convert_layout(words, gl.SliceLayout(1, P_L), assert_trivial=True)


@gluon.jit
def _low_half(packed):
    """The fp16 in the low half of each word."""
    return (packed & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True)


@gluon.jit
def _offset_zero(zeros, s: gl.constexpr):
    """fp16(1024 + zero) of group s: the code of a zero is the lowest bits of that number."""
    return ((zeros >> (4 * s)) & 15 | 0x6400).to(gl.int16).to(gl.float16, bitcast=True)


@gluon.jit
def _spread(low, high, w, GROUP: gl.constexpr, P_L: gl.constexpr):
    """Give each column of w [64, 32] the value [64] of its group.

    `low` in the first half, `high` in the second; groups of 64: `low` in both.
    """
    low = gl.broadcast(low[:, None], w)[0]
    if GROUP == 32:
        first = (gl.arange(0, 32, gl.SliceLayout(0, P_L)) < 16)[None, :]
        low = gl.where(gl.broadcast(first, w)[0], low, gl.broadcast(high[:, None], w)[0])
    return low


@gluon.jit
def _scaled_groups(w, stored, index, g, GROUP: gl.constexpr, P_L: gl.constexpr):
    """`_scaled` for groups of 32 and 64 of column block g."""
    SIDES: gl.constexpr = 64 // GROUP + 1
    first = _features(stored, index * SIDES, P_L)
    zeros = _features(stored, index * SIDES + SIDES - 1, P_L) >> (g * (128 // GROUP) % 8 * 4)
    if GROUP == 32:
        second = _features(stored, index * SIDES + 1, P_L)
        zero = _spread(_offset_zero(zeros, 0), _offset_zero(zeros, 1), w, GROUP, P_L)
        zero_high = _spread(_offset_zero(zeros, 2), _offset_zero(zeros, 3), w, GROUP, P_L)
        scale = _spread(_low_half(first), _low_half(first >> 16), w, GROUP, P_L)
        scale_high = _spread(_low_half(second), _low_half(second >> 16), w, GROUP, P_L)
    else:
        zero = _spread(_offset_zero(zeros, 0), zeros, w, GROUP, P_L)
        zero_high = _spread(_offset_zero(zeros, 1), zeros, w, GROUP, P_L)
        scale = _spread(_low_half(first), first, w, GROUP, P_L)
        scale_high = _spread(_low_half(first >> 16), first, w, GROUP, P_L)
    return _scaled_planes(w, zero, scale, zero_high, scale_high)


@gluon.jit
def _concat(a, b, P_L: gl.constexpr):
    """Concatenate 32 columns and 32 more."""
    both = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (64, 64))
    return gl.convert_layout(both, P_L, assert_trivial=True)


@gluon.jit
def dequantized(words_held, scale_zeros_held, index, g, P_L: gl.constexpr, GROUP: gl.constexpr):
    """Dequantize 64 features of a column block to two operands [64, 64].

    These are the planes of low and of high nibbles. The layouts define which thread reads what, so that no data
    moves after the loads; `assert_trivial` enforces that in the compiler. g: number of the column block, for
    groups below 128.
    """
    W_L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 128]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[1, 0], [2, 0]],
        [],
        [4, 256],
    )
    words = words_held.index(index).load(W_L)
    if GROUP == 128:
        scale_zero = _features(scale_zeros_held, index, P_L)
    w = gl.join(words.to(gl.int16), (words >> 16).to(gl.int16))
    w = gl.permute(gl.reshape(w, (4, 2, 8, 4, 2, 2, 2)), (0, 5, 2, 1, 4, 3, 6))
    w = gl.convert_layout(gl.reshape(w, (64, 32)), P_L, assert_trivial=True)
    if GROUP == 128:
        scale = (scale_zero & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True)
        zero = (scale_zero >> 16).to(gl.int16).to(gl.float16, bitcast=True) + 1024.0
        zero = zero.to(gl.float16)
        zero = gl.broadcast(zero[:, None], w)[0]
        scale = gl.broadcast(scale[:, None], w)[0]
        a, b, c, d = _scaled(w, zero, scale)
    else:
        a, b, c, d = _scaled_groups(w, scale_zeros_held, index, g, GROUP, P_L)
    return _concat(a, b, P_L), _concat(c, d, P_L)


@gluon.jit
def _own_order(TILE: gl.constexpr, M_L: gl.constexpr):
    """Return the offsets of a warpgroup's sums [64, TILE] in its workspace.

    Those of a thread are contiguous.
    """
    f = gl.arange(0, 64, gl.SliceLayout(1, M_L))
    m = gl.arange(0, TILE, gl.SliceLayout(0, M_L))
    row = f // 16 * (16 * TILE) + f // 8 % 2 * 64 + f % 8 * 8
    return row[:, None] + (m // 8 * 128 + m % 8)[None, :]


@gluon.jit
def hand_over(work, flags, acc, acc2, WG: gl.constexpr, many: gl.constexpr, M_L: gl.constexpr):
    """Leave sums of a tile's later groups to the program that has its first ones."""
    c = gl.num_programs(0) - 1 - gl.program_id(0)
    slot = c * 2 + WG
    mine = work + slot * (64 * many.BLOCKS * many.TILE) + _own_order(many.TILE, M_L)
    gl.store(mine, acc)
    if many.BLOCKS == 2:
        gl.store(mine + 64 * many.TILE, acc2)
    barrier()
    gl.atomic_xchg(flags + slot, 1, sem="release")


@gluon.jit
def take_over(work, flags, acc, acc2, WG: gl.constexpr, many: gl.constexpr, M_L: gl.constexpr):
    """Add the sums of the previous program, which computes them first.

    Resets the flag to zero for the next launch.
    """
    slot = (gl.num_programs(0) - gl.program_id(0)) * 2 + WG
    flag = flags + slot
    seen = gl.atomic_add(flag, 0, sem="acquire")
    while seen == 0:
        seen = gl.atomic_add(flag, 0, sem="acquire")
    theirs = work + slot * (64 * many.BLOCKS * many.TILE) + _own_order(many.TILE, M_L)
    acc += gl.load(theirs, cache_modifier=".cg")
    if many.BLOCKS == 2:
        acc2 += gl.load(theirs + 64 * many.TILE, cache_modifier=".cg")
    gl.store(flag, 0)
    return acc, acc2


@gluon.jit
def _inverse_rms(squares, row, M, eps, TILE: gl.constexpr, G: gl.constexpr):
    R_L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    m = row * TILE + gl.arange(0, TILE, gl.SliceLayout(1, R_L))
    j = gl.arange(0, triton.next_power_of_2(G), gl.SliceLayout(0, R_L))
    inside = (m < M)[:, None] & (j < G)[None, :]
    parts = gl.load(squares + m[:, None] * G + j[None, :], mask=inside, other=0.0)
    return gl.rsqrt(gl.sum(parts, 1) / (G * 128) + eps)


@gluon.jit
def _store_activated(out, M, gate, up, row, column, WG: gl.constexpr, many: gl.constexpr):
    """Store act_and_mul (activation.py) of gate and up, fp16 in slot order."""
    TILE: gl.constexpr = many.TILE
    slope = gate
    if many.GELU:
        slope = gate * (1.5957691216057308 + 0.07135481282553545 * gate * gate)
        slope = gl.maximum(slope, -80.0)
    v = gate / (1.0 + gl.exp(-slope)) * up
    # The comparison keeps NaN, which the clamp would make a number.
    v = gl.where(v == v, gl.minimum(gl.maximum(v, -65504.0), 65504.0), v).to(gl.float16)
    # columns of half a block, (quad, half, pair, h, i), or (half, quad, pair, h, i) for a weight in groups of
    # 32, in slot order: (h, half, pair, quad, i)
    if many.INTO == 32:
        v = gl.permute(gl.reshape(v, (2, 4, 2, 2, 2, TILE)), (5, 3, 0, 2, 1, 4))
    else:
        v = gl.permute(gl.reshape(v, (4, 2, 2, 2, 2, TILE)), (5, 3, 1, 2, 0, 4))
    O_L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    v = gl.convert_layout(gl.reshape(v, (TILE, 64)), O_L)
    m = row * TILE + gl.arange(0, TILE, gl.SliceLayout(1, O_L))
    cell = column * 128 + WG * 64 + gl.arange(0, 64, gl.SliceLayout(0, O_L))
    gl.store(
        out + m.to(gl.int64)[:, None] * (many.N // 2) + cell[None, :], v, mask=(m < M)[:, None]
    )


@gluon.jit
def finish(
    out,
    squares,
    eps,
    M,
    acc,
    acc2,
    row,
    column,
    split,
    WG: gl.constexpr,
    many: gl.constexpr,
    M_L: gl.constexpr,
):
    """Divide a tile's sums by the rms of their rows, and store them or their act_and_mul."""
    if many.NORM:
        shrink = _inverse_rms(squares, row, M, eps, many.TILE, many.K // 128)
        shrink = gl.convert_layout(shrink, gl.SliceLayout(0, M_L))[None, :]
        acc = acc * shrink
        if many.BLOCKS == 2:
            acc2 = acc2 * shrink
    if many.FUSED:
        _store_activated(out, M, acc, acc2, row, column, WG, many)
    else:
        # Stored from registers in pieces of 32 bytes: transposing in shared memory first, into pieces of 256,
        # takes as long.
        m = row * many.TILE + gl.arange(0, many.TILE, gl.SliceLayout(0, M_L))
        f = (
            column * (128 * many.BLOCKS)
            + WG * (64 * many.BLOCKS)
            + gl.arange(0, 64, gl.SliceLayout(1, M_L))
        )
        offsets = m[None, :] * many.N + f[:, None]
        base = out + split * M * many.N
        gl.store(base + offsets, acc, mask=(m < M)[None, :])
        if many.BLOCKS == 2:
            gl.store(base + 64 + offsets, acc2, mask=(m < M)[None, :])
