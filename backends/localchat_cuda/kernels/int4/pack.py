"""Packs 4-bit weights in the tensor cores' operand order; unpacks, reorders, reads AutoAWQ.

Letters: N output features, K input features, G = K / 128 column blocks, T = N / 16 row blocks, S groups of a
column block: 1, 2 or 4 for groups of 128, 64 or 32. A group has one scale and one zero. Before packing a weight
is as in a linear layer, codes and zeros in 0..15:

    w[n, k] = scale[n, k // group] * (code[n, k] - zero[n, k // group])

One row block of one column block is 16 x 128 codes = 1,024 bytes, laid out so that a warp reads it as two
coalesced loads of 16 bytes a lane and every lane then holds its part of the left operand of `mma`:
no shared memory, no shuffles. The order of k inside a column block is free as long as the activations
follow it. One byte holds k and k + 64; with `half`, `pair` in 0..1, `quad` in 0..3, `row` in 0..7:

    byte  half*512 + (row*4 + quad)*16 + pair*8 + upper*4 + e
    low nibble   code[16*T + 8*upper + row, 128*g + 16*quad + 8*half + 4*pair + SWAP[e]]
    high nibble  code[.., k + 64] xor 8

For groups of 32 the column is 128*g + 32*half + 8*quad + 4*pair + SWAP[e] instead: then each half of low and of
high nibbles, an `mma` of 32 k, is a group of its own. With groups of 64 each nibble is one.

The high nibble is stored with its top bit flipped: `byte & 0xf0`, read as a signed byte, is then 16
times (code - 8), and the int8 gemm unpacks 8 weights with two ANDs. SWAP, which is (0, 2, 1, 3),
puts neighbours in k into the two halves of a 32-bit word, so that the fp16 gemm unpacks pairs in
natural order with one shift and four three-input operations. All gemm variants of this folder read
the same bytes.

The idea of weights in fragment order is Marlin's (Frantar et al., 2024); the orders here are our
own.
"""

from typing import NamedTuple

import torch

BLOCK_K = 128
"""Columns of a column block."""
ROWS = 16
BLOCK_BYTES = ROWS * BLOCK_K // 2
GROUPS = (32, 64, 128)
"""Possible columns of a scale and a zero."""
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ: nibble i of a word holds column AWQ_COLUMNS[i] of its eight."""

_SWAP = (0, 2, 1, 3)


class E4M3Copy(NamedTuple):
    """A weight with groups of 128 in e4m3, which stores whole numbers up to 16 exactly."""

    codes: torch.Tensor
    """e4m3 [N, K]: code - zero, with columns in stored order."""
    scales: torch.Tensor
    """fp32 [G, N]."""


class W4(NamedTuple):
    """A packed weight: y[m, n] = sum_k x[m, k] w[n, k]."""

    codes: torch.Tensor
    """int8 [T, G, 1024]."""
    scale_zeros: torch.Tensor
    """int32. Groups of 128: [T, G, 16], an fp16 scale in the low half and the zero as fp16 in the high half.
    Smaller groups: [T, words], for each column block and each two of its groups 16 words of two fp16
    scales, the first in the low half; after all of these 16 words for each eight groups in a row, their zeros
    in four bits each. Groups of 32 so take 10 bytes for 128 columns of a row in place of 16."""
    order: torch.Tensor | None = None
    """int32 [K] if the columns were sorted to make each group contiguous: stored column k is column order[k] of
    the layer, and x must have its columns in that order. None: the layer's order."""
    unpacked: torch.Tensor | E4M3Copy | None = None
    """A copy in fp16 or bf16 [N, K], with columns in stored order, or in e4m3.

    If memory is plentiful, the gemms of prompts use it instead of dequantizing.
    """
    group: int = BLOCK_K
    """Columns of a scale and a zero, one of GROUPS."""
    e2m1: bool = False
    """Codes and scales are floating, in the order of e2m1.py: gemms of experts alone read these."""
    padding: int = 0
    """Columns of zeros behind those of the layer, up to a multiple of 128: rows must be as wide."""

    @property
    def features_out(self) -> int:
        return int(self.codes.shape[0]) * ROWS

    @property
    def features_in(self) -> int:
        return int(self.codes.shape[1]) * BLOCK_K

    @property
    def copy_type(self) -> type | None:
        """Type of the unpacked copy, or None without a copy."""
        if self.unpacked is None:
            return None
        return type(self.unpacked)


def side_shape(n: int, k: int, group: int) -> tuple[int, ...]:
    """Return the shape of W4.scale_zeros for a weight of N x K."""
    if group == BLOCK_K:
        return n // ROWS, k // BLOCK_K, ROWS
    groups = k // group
    return n // ROWS, ROWS * (groups // 2 + -(-groups // 8))


def pack(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> W4:
    """Pack integer codes [N, K] (0..15), and scales and zeros [N, K / group].

    Exact but for the rounding of the scale. ValueError if N is no multiple of 16, K none of 128, or the group
    none of GROUPS.
    """
    n, k = codes.shape
    if n % ROWS or k % BLOCK_K:
        raise ValueError(f"codes: rows in {ROWS}s and columns in {BLOCK_K}s wanted, {n}x{k} given")
    group = k // scales.shape[1] if scales.dim() == 2 and scales.shape[1] else 0
    shape = n, k // group if group in GROUPS else 0
    if tuple(scales.shape) != shape or tuple(zeros.shape) != shape:
        raise ValueError(
            f"scales and zeros: one for each 32, 64 or 128 of {k} columns in {n} rows wanted,"
            f" {tuple(scales.shape)}, {tuple(zeros.shape)}"
        )
    t = n // ROWS
    g = k // BLOCK_K
    #                       t  upper row g  plane quad half pair e
    tile = codes.to(torch.uint8)
    if group == 32:
        tile = tile.view(t, 2, 8, g, 2, 2, 4, 2, 4).transpose(5, 6)
    else:
        tile = tile.view(t, 2, 8, g, 2, 4, 2, 2, 4)
    tile = tile[..., list(_SWAP)]
    low = tile.select(4, 0)
    high = tile.select(4, 1)
    packed = low | ((high ^ 8) << 4)  # t upper row g quad half pair e
    packed = packed.permute(0, 3, 5, 2, 4, 6, 1, 7).contiguous().view(t, g, BLOCK_BYTES)
    return W4(packed.view(torch.int8), pack_sides(scales, zeros, group), group=group)


def unpack(weight: W4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Invert `pack`: codes uint8 [N, K], scales fp16 and zeros fp16, both [N, K / group]."""
    t, g = weight.codes.shape[:2]
    tile = weight.codes.view(torch.uint8).view(t, g, 2, 8, 4, 2, 2, 4)
    tile = tile.permute(0, 6, 3, 1, 4, 2, 5, 7)  # t upper row g quad half pair e
    planes = torch.stack((tile & 15, (tile >> 4) ^ 8), dim=4)[..., list(_SWAP)]
    if weight.group == 32:
        planes = planes.transpose(5, 6)
    return planes.reshape(t * ROWS, g * BLOCK_K), *_unpack_sides(weight)


def pack_sides(scales: torch.Tensor, zeros: torch.Tensor, group: int) -> torch.Tensor:
    """Lay out scales and zeros [N, K / group] as in W4.scale_zeros."""
    n, groups = scales.shape
    t = n // ROWS
    halves = scales.to(torch.float16).contiguous().view(torch.int16).to(torch.int32)
    if group == BLOCK_K:
        high_half = zeros.to(torch.float16).contiguous().view(torch.int16).to(torch.int32)
        words = (halves & 0xFFFF) | (high_half << 16)
        return words.view(t, ROWS, groups).transpose(1, 2).contiguous()
    pairs = halves.view(t, ROWS, groups // 2, 2)
    pairs = (pairs[..., 0] & 0xFFFF) | (pairs[..., 1] << 16)
    runs = -(-groups // 8)
    nibbles = torch.zeros(t, ROWS, runs * 8, dtype=torch.int32, device=scales.device)
    nibbles[..., :groups] = zeros.to(torch.int32).view(t, ROWS, groups)
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=scales.device)
    # places of four bits do not overlap, so their sum is their union; the last one may set the sign
    words = (nibbles.view(t, ROWS, runs, 8) << shifts).sum(-1, dtype=torch.int32)
    return torch.cat((pairs, words), 2).transpose(1, 2).reshape(t, -1).contiguous()


def _unpack_sides(weight: W4) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert `pack_sides`, zeros as fp16."""
    t = weight.codes.shape[0]
    k = weight.features_in
    groups = k // weight.group
    words = weight.scale_zeros.reshape(t, -1, ROWS).transpose(1, 2)  # t row words
    if weight.group == BLOCK_K:
        scales = words & 0xFFFF
        zeros = words >> 16
        return tuple(  # type: ignore[return-value]
            side.to(torch.int16).view(torch.float16).reshape(t * ROWS, groups)
            for side in (scales, zeros)
        )
    pairs = words[..., : groups // 2]
    nibbles = words[..., groups // 2 :]
    scales = torch.stack((pairs & 0xFFFF, pairs >> 16), -1).to(torch.int16).view(torch.float16)
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=words.device)
    zeros = ((nibbles[..., None] >> shifts) & 15).reshape(t, ROWS, -1)[..., :groups]
    return scales.reshape(t * ROWS, groups), zeros.to(torch.float16).reshape(t * ROWS, groups)


def dense(weight: W4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight [N, K] in floating point, in stored column order: the reference of every variant."""
    codes, scales, zeros = unpack(weight)
    spread = codes.float() - zeros.float().repeat_interleave(weight.group, 1)
    return (spread * scales.float().repeat_interleave(weight.group, 1)).to(dtype)


def rows_sorted(weight: W4, rows: torch.Tensor) -> W4:
    """Return the weight whose output feature n is feature rows[n] of this one. rows: int64 [N]. Exact."""
    t, g = weight.codes.shape[:2]
    tile = weight.codes.view(t, g, 2, 8, 4, 2, 2, 4)  # t g half row quad pair upper e
    lines = tile.permute(0, 6, 3, 1, 2, 4, 5, 7).reshape(t * ROWS, g, 2, 4, 2, 4)[rows]
    tile = lines.view(t, 2, 8, g, 2, 4, 2, 4).permute(0, 3, 4, 2, 5, 6, 1, 7)
    codes = tile.reshape(t, g, BLOCK_BYTES)
    words = weight.scale_zeros.reshape(t, -1, ROWS).transpose(1, 2).reshape(t * ROWS, -1)[rows]
    words = words.view(t, ROWS, -1).transpose(1, 2).reshape(weight.scale_zeros.shape)
    return weight._replace(codes=codes, scale_zeros=words.contiguous(), unpacked=None)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Unpack AutoAWQ's int32 words [rows, C] to codes [rows, 8 C] in natural column order."""
    shifts = torch.tensor([4 * AWQ_COLUMNS.index(i) for i in range(8)], device=words.device)
    codes = (words.unsqueeze(-1) >> shifts.to(torch.int32)) & 15
    return codes.to(torch.uint8).view(words.shape[0], -1)


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> W4:
    """Repack one AutoAWQ ("gemm" version) linear layer.

    qweight int32 [K, N/8], qzeros int32 [K/group, N/8], scales fp16 or bf16 [K/group, N]. Several layers are
    merged by concatenating each of the three along N first. ValueError for a group size that is none of GROUPS.
    """
    k = qweight.shape[0]
    n = 8 * qweight.shape[1]
    if tuple(scales.shape) not in [(k // group, n) for group in GROUPS if k % group == 0]:
        raise ValueError(
            f"AWQ layer {k}x{n} with scales {tuple(scales.shape)}:"
            " groups of 32, 64 or 128 input features wanted"
        )
    codes, scales, zeros, padding = with_columns(
        _nibbles(qweight).t(), scales.t(), _nibbles(qzeros).t()
    )
    return pack(codes.contiguous(), scales, zeros)._replace(padding=padding)


def with_columns(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Pad codes [N, K] with zeros, and scales and zeros [N, G] with groups. Also returns their number.

    K is then a multiple of 128. ValueError if groups do not divide it.
    """
    k = codes.shape[1]
    groups = scales.shape[1]
    padding = -k % BLOCK_K
    if not padding:
        return codes, scales, zeros, 0
    group = k // groups
    if k % groups or padding % group:
        raise ValueError(f"{k} columns in groups of {group} cannot be padded")
    pad = torch.nn.functional.pad
    more = (0, padding // group)
    return pad(codes, (0, padding)), pad(scales, more), pad(zeros, more), padding
