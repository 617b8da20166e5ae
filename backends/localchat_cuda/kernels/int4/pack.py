"""Packs 4-bit weights in the tensor cores' operand order; unpacks, reorders, reads AutoAWQ.

Letters: N output features, K input features, G = K / 128 groups of one scale and one zero,
T = N / 16 row blocks. Before packing a weight is as in a linear layer, codes and zeros in 0..15:

    w[n, k] = scale[n, k // 128] * (code[n, k] - zero[n, k // 128])

One row block of one group is 16 x 128 codes = 1,024 bytes, laid out so that a warp reads it as two
coalesced loads of 16 bytes a lane and every lane then holds its part of the left operand of `mma`:
no shared memory, no shuffles. The order of k inside a group is free as long as the activations
follow it. One byte holds k and k + 64; with `half`, `pair` in 0..1, `quad` in 0..3, `row` in 0..7:

    byte  half*512 + (row*4 + quad)*16 + pair*8 + upper*4 + e
    low nibble   code[16*T + 8*upper + row, 128*g + 16*quad + 8*half + 4*pair + SWAP[e]]
    high nibble  code[.., k + 64] xor 8

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

GROUP = 128
ROWS = 16
BLOCK_BYTES = ROWS * GROUP // 2
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ: nibble i of a word holds column AWQ_COLUMNS[i] of its eight."""

_SWAP = (0, 2, 1, 3)


class W4(NamedTuple):
    """A packed weight: y[m, n] = sum_k x[m, k] w[n, k]."""

    codes: torch.Tensor
    """int8 [T, G, 1024]."""
    scale_zeros: torch.Tensor
    """int32 [T, G, 16]: an fp16 scale in the low half and the zero as fp16 in the high half."""
    order: torch.Tensor | None = None
    """int32 [K] if the columns were sorted to make each group contiguous: stored column k is column order[k] of
    the layer, and x must have its columns in that order. None: the layer's order."""
    unpacked: torch.Tensor | None = None
    """The same weight [N, K] in fp16 or bf16, its columns in stored order, where memory is plentiful: the gemms
    of prompts need not dequantize it."""

    @property
    def features_out(self) -> int:
        return int(self.codes.shape[0]) * ROWS

    @property
    def features_in(self) -> int:
        return int(self.codes.shape[1]) * GROUP

    @property
    def bytes(self) -> int:
        order = 0 if self.order is None else 4 * self.order.numel()
        unpacked = 0 if self.unpacked is None else 2 * self.unpacked.numel()
        return self.codes.numel() + 4 * self.scale_zeros.numel() + order + unpacked


def pack(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> W4:
    """Pack codes [N, K] (any integer dtype, 0..15), scales [N, G] (stored as fp16) and zeros [N, G].

    Exact but for the rounding of the scale. ValueError if N is no multiple of 16 or K none of 128.
    """
    n, k = codes.shape
    if n % ROWS or k % GROUP:
        raise ValueError(
            f"codes: rows in 16s and columns in groups of {GROUP} wanted, {n}x{k} given"
        )
    t, g = n // ROWS, k // GROUP
    if tuple(scales.shape) != (n, g) or tuple(zeros.shape) != (n, g):
        raise ValueError(
            f"scales and zeros: {n}x{g} wanted, {tuple(scales.shape)}, {tuple(zeros.shape)}"
        )
    #                       t  upper row g  plane quad half pair e
    tile = codes.to(torch.uint8).view(t, 2, 8, g, 2, 4, 2, 2, 4)[..., list(_SWAP)]
    low, high = tile.select(4, 0), tile.select(4, 1)
    packed = low | ((high ^ 8) << 4)  # t upper row g quad half pair e
    packed = packed.permute(0, 3, 5, 2, 4, 6, 1, 7).contiguous().view(t, g, BLOCK_BYTES)
    low_half = scales.to(torch.float16).contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    high_half = zeros.to(torch.float16).contiguous().view(torch.int16).to(torch.int32)
    scale_zeros = (low_half | (high_half << 16)).view(t, ROWS, g).transpose(1, 2).contiguous()
    return W4(packed.view(torch.int8), scale_zeros)


def unpack(weight: W4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Invert `pack`: codes uint8 [N, K], scales fp16 [N, G], zeros fp16 [N, G]."""
    t, g = weight.codes.shape[:2]
    tile = weight.codes.view(torch.uint8).view(t, g, 2, 8, 4, 2, 2, 4)
    tile = tile.permute(0, 6, 3, 1, 4, 2, 5, 7)  # t upper row g quad half pair e
    planes = torch.stack((tile & 15, (tile >> 4) ^ 8), dim=4)[..., list(_SWAP)]
    codes = planes.reshape(t * ROWS, g * GROUP)
    scale_zeros = weight.scale_zeros.transpose(1, 2).reshape(t * ROWS, g)
    scales = (scale_zeros & 0xFFFF).to(torch.int16).view(torch.float16)
    zeros = (scale_zeros >> 16).to(torch.int16).view(torch.float16)
    return codes, scales, zeros


def dense(weight: W4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight [N, K] in floating point, in stored column order: the reference of every variant."""
    codes, scales, zeros = unpack(weight)
    spread = codes.float() - zeros.float().repeat_interleave(GROUP, 1)
    return (spread * scales.float().repeat_interleave(GROUP, 1)).to(dtype)


def rows_sorted(weight: W4, rows: torch.Tensor) -> W4:
    """Return the weight whose output feature n is feature rows[n] of this one; rows int64 [N]. Exact."""
    t, g = weight.codes.shape[:2]
    tile = weight.codes.view(t, g, 2, 8, 4, 2, 2, 4)  # t g half row quad pair upper e
    lines = tile.permute(0, 6, 3, 1, 2, 4, 5, 7).reshape(t * ROWS, g, 2, 4, 2, 4)[rows]
    tile = lines.view(t, 2, 8, g, 2, 4, 2, 4).permute(0, 3, 4, 2, 5, 6, 1, 7)
    codes = tile.reshape(t, g, BLOCK_BYTES)
    scale_zeros = weight.scale_zeros.transpose(1, 2).reshape(t * ROWS, g)[rows]
    scale_zeros = scale_zeros.view(t, ROWS, g).transpose(1, 2).contiguous()
    return W4(codes, scale_zeros, weight.order)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Unpack [rows, C] int32 words of AutoAWQ to [rows, 8 C] codes in natural column order."""
    shifts = torch.tensor([4 * AWQ_COLUMNS.index(i) for i in range(8)], device=words.device)
    codes = (words.unsqueeze(-1) >> shifts.to(torch.int32)) & 15
    return codes.to(torch.uint8).view(words.shape[0], -1)


def from_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> W4:
    """Repack one AutoAWQ ("gemm" version) linear layer.

    qweight int32 [K, N/8], qzeros int32 [G, N/8], scales fp16 or bf16 [G, N]. Several layers are
    merged by concatenating each of the three along N first. ValueError for a group size other than
    128.
    """
    k, n = qweight.shape[0], 8 * qweight.shape[1]
    if tuple(scales.shape) != (k // GROUP, n) or k % GROUP:
        raise ValueError(
            f"AWQ layer {k}x{n} with scales {tuple(scales.shape)}:"
            f" groups of {GROUP} input features wanted"
        )
    codes = _nibbles(qweight).t()
    return pack(codes.contiguous(), scales.t(), _nibbles(qzeros).t())


def to_awq(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert codes [N, K], scales and zeros [N, G] to AutoAWQ's (qweight, qzeros, scales).

    For random checkpoints and tests.
    """

    def words(values: torch.Tensor) -> torch.Tensor:
        columns = values.to(torch.int64).view(values.shape[0], -1, 8)[..., list(AWQ_COLUMNS)]
        shifts = 4 * torch.arange(8, device=values.device)
        total = (columns << shifts).sum(-1)
        return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)

    return words(codes.t().contiguous()), words(zeros.t().contiguous()), scales.t().contiguous()
