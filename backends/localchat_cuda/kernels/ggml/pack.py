"""Weights in ggml's block formats, repacked for the gemms of this folder; exact.

Letters: N output and K input features; T = ceil(N / 16) row tiles, B = ceil(K / 256) column blocks, G groups
of a column block: 8 of 32 columns, or 16 of 16.

    w[n, k] = value(code[n, k]) * scale[n, group] - minimum[n, group]

in fp32 and in this order, as ggml's own dequantization rounds. A code's value is `code - offset`, or an entry
of a table. A scale is an fp16 number, or such a number of 256 columns times an integer of the group: its
product has up to 18 bits, so the two are kept apart. The same holds for minimums.

A code of 3, 5 or 6 bits is cut in two planes, so that each has 1, 2, 4 or 8 bits. The element of a plane for a
column of a group holds that column of all groups of the block, group 0 in the lowest bits: one load, and a
shift and a mask for each group. Elements of 64 bits are stored in two parts. The 16 x GROUP elements of a tile
are in the order of `mma`'s left operand, four neighbours for each lane:

    half (k / 16), upper (row / 8), row % 8, quad (k / 2 % 4), pair (k / 8 % 2), k % 2

Rows and columns beyond the weight have scale and minimum 0.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from localchat_cuda.ggml_forms import BLOCK, FORMS, GGUF_FORMS, INT8, INT8_ZEROS, ROWS, GgmlForm
from localchat_cuda.kernels.ggml.blocks import SplitRows, split

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""
_SLICE_ROWS = 2048


class GgmlTensor(NamedTuple):
    """A repacked weight of one number format."""

    type: str
    """Name of the number format, one of ggml_forms.FORMS."""
    features_out: int
    features_in: int
    low: torch.Tensor
    """int8, int16 or int32 [T, B, parts, 16 * GROUP]."""
    high: torch.Tensor | None
    """Upper bits of codes of 3, 5 or 6 bits, [T, B, 1, 16 * GROUP]."""
    scales: torch.Tensor
    """fp16 [T, B, G, 16], or [T, B, 1, 16] with factors."""
    factors: torch.Tensor | None
    """int8 [T, B, G, 16]."""
    minimums: torch.Tensor | None
    """fp16, as scales."""
    minimum_factors: torch.Tensor | None
    """int8 [T, B, G, 16]."""

    @property
    def form(self) -> GgmlForm:
        return FORMS[self.type]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(each for each in self if isinstance(each, torch.Tensor))

    @property
    def bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.tensors)


class GgmlWeight(NamedTuple):
    """A weight of one gemm, its parts along N each in a format of their own."""

    parts: tuple[GgmlTensor, ...]
    order: torch.Tensor | None = None
    """int32 [K]: packed column k is column order[k] of the layer (act-order). None: as in the layer."""

    @property
    def features_out(self) -> int:
        return sum(part.features_out for part in self.parts)

    @property
    def features_in(self) -> int:
        return self.parts[0].features_in

    @property
    def bytes(self) -> int:
        order = 0 if self.order is None else 4 * self.order.numel()
        return sum(part.bytes for part in self.parts) + order


def pack(type_: str, raw: torch.Tensor, k: int) -> GgmlTensor:
    """Repack the stored bytes uint8 [N, bytes of a row] of a tensor with K columns.

    ValueError for a format that is not in ggml_forms.GGUF_FORMS, or rows of another length.
    """
    form = GGUF_FORMS.get(type_)
    if form is None:
        raise ValueError(f"type: one of {', '.join(GGUF_FORMS)} wanted, {type_} given")
    expected = k // form.block * form.block_bytes
    if k % form.block or raw.shape[1] != expected:
        raise ValueError(
            f"raw: {expected} bytes for {k} columns of {type_} wanted, {raw.shape[1]} given"
        )
    rows = (split(type_, some) for some in raw.split(_SLICE_ROWS))
    return _packed(type_, rows, raw.shape[0], k)


def pack_int8(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
) -> GgmlTensor:
    """Pack whole numbers: uint8 codes [N, K], and scales fp16 and zeros [N, G] of groups of K / G columns.

    w = (code - zero) * scale; without zeros they are 128, and the numbers exact. With zeros, (zero - 128) *
    scale is rounded to fp16, which is by at most 1/16 of a step. ValueError for groups that are no multiple
    of 32 columns.
    """
    n, k = codes.shape
    times, rest = divmod(k // scales.shape[1], FORMS[INT8].group)
    if rest:
        raise ValueError(f"groups: multiples of 32 columns wanted, {k // scales.shape[1]} given")
    wide = scales.half().repeat_interleave(times, 1)
    if zeros is None:
        rows = map(SplitRows, codes.split(_SLICE_ROWS), wide.split(_SLICE_ROWS))
        return _packed(INT8, rows, n, k)
    minimums = ((zeros.float() - 128) * scales.float()).half().repeat_interleave(times, 1)
    parts = (each.split(_SLICE_ROWS) for each in (codes, wide, minimums))
    some = (SplitRows(each, scale, None, least) for each, scale, least in zip(*parts, strict=True))
    return _packed(INT8_ZEROS, some, n, k)


def _packed(type_: str, some: Iterable[SplitRows], n: int, k: int) -> GgmlTensor:
    slices = [_pack_rows(FORMS[type_], rows) for rows in some]
    low, high, *sides = (_joined(column) for column in zip(*slices, strict=True))
    assert low is not None
    assert sides[0] is not None
    return GgmlTensor(type_, n, k, low, high, sides[0], *sides[1:])


def _joined(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    held = [part for part in parts if part is not None]
    return held[0] if len(held) == 1 else torch.cat(held) if held else None


def _pack_rows(form: GgmlForm, rows: SplitRows) -> tuple[torch.Tensor | None, ...]:
    low_bits, high_bits = form.planes
    codes = _padded(rows.codes, BLOCK)
    low = _plane(codes & ((1 << low_bits) - 1), low_bits, form.group)
    high = _plane(codes >> low_bits, high_bits, form.group) if high_bits else None
    per_block = BLOCK // form.group
    wide = 1 if form.factors else per_block
    return (
        low,
        high,
        _side(rows.scales, wide),
        None if rows.factors is None else _side(rows.factors, per_block),
        None if rows.minimums is None else _side(rows.minimums, wide),
        None if rows.minimum_factors is None else _side(rows.minimum_factors, per_block),
    )


def _padded(found: torch.Tensor, columns: int) -> torch.Tensor:
    """Zeros behind the last row and column up to whole tiles."""
    n, k = found.shape
    rows, wide = -(-n // ROWS) * ROWS, -(-k // columns) * columns
    if (rows, wide) == (n, k):
        return found
    return torch.nn.functional.pad(found, (0, wide - k, 0, rows - n))


def _side(found: torch.Tensor, per_block: int) -> torch.Tensor:
    """[N, groups] as [T, B, per_block, 16]."""
    padded = _padded(found, per_block)
    tiles = padded.view(padded.shape[0] // ROWS, ROWS, -1, per_block)
    return tiles.permute(0, 2, 3, 1).contiguous()


def element_bits(bits: int, group: int) -> int:
    """Bits of an element of a plane."""
    return min(32, bits * (BLOCK // group))


_ELEMENTS = {8: torch.int8, 16: torch.int16, 32: torch.int32}


def _plane(values: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    n, k = values.shape
    t, b, groups, width = n // ROWS, k // BLOCK, BLOCK // group, element_bits(bits, group)
    fields = width // bits
    #                  t  upper row b  part  field  half  pair quad e
    tiles = values.view(t, 2, 8, b, groups // fields, fields, group // 16, 2, 4, 2)
    elements = torch.zeros_like(tiles[:, :, :, :, :, 0], dtype=torch.int32)
    for field in range(fields):
        elements |= tiles[:, :, :, :, :, field].to(torch.int32) << (bits * field)
    #                          t  b  part half upper row quad pair e
    ordered = elements.permute(0, 3, 4, 5, 1, 2, 7, 6, 8)
    return ordered.to(_ELEMENTS[width]).reshape(t, b, groups // fields, ROWS * group)


def _unplaned(plane: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Invert `_plane`: uint8 [N, K]."""
    t, b, parts, _ = plane.shape
    ordered = plane.to(torch.int32).view(t, b, parts, group // 16, 2, 8, 4, 2, 2)
    elements = ordered.permute(0, 4, 5, 1, 2, 3, 7, 6, 8)  # t upper row b part half pair quad e
    fields = element_bits(bits, group) // bits
    mask = (1 << bits) - 1
    tiles = torch.stack([(elements >> (bits * i)) & mask for i in range(fields)], dim=5)
    return tiles.to(torch.uint8).reshape(t * ROWS, b * BLOCK)


def _unsided(side: torch.Tensor) -> torch.Tensor:
    """Invert `_side`: fp32 [N, groups]."""
    t, b, per_block, _ = side.shape
    return side.float().permute(0, 3, 1, 2).reshape(t * ROWS, b * per_block)


def _product(numbers: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    wide = _unsided(numbers)
    if factors is None:
        return wide
    return wide.repeat_interleave(factors.shape[2], 1) * _unsided(factors)


def dense(weight: GgmlTensor | GgmlWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight [N, K] in floating point, its columns as packed, bit-equal to ggml's in fp32: the
    reference of the gemms."""
    if isinstance(weight, GgmlWeight):
        return torch.cat([dense(part, dtype) for part in weight.parts])
    form = weight.form
    low_bits, high_bits = form.planes
    codes = _unplaned(weight.low, low_bits, form.group)
    if weight.high is not None:
        codes |= _unplaned(weight.high, high_bits, form.group) << low_bits
    if form.table:
        table = torch.tensor(TABLE, dtype=torch.float32, device=codes.device)
        values = table[codes.long()]
    else:
        values = codes.float() - form.offset
    scales = _product(weight.scales, weight.factors)
    found = values.mul_(scales.repeat_interleave(form.group, 1))
    if weight.minimums is not None:
        minimums = _product(weight.minimums, weight.minimum_factors)
        found -= minimums.repeat_interleave(form.group, 1)
    return found[: weight.features_out, : weight.features_in].to(dtype)
