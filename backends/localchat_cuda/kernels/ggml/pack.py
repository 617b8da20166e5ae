"""Weights in ggml's block formats, repacked for the gemms of this folder; exact.

Letters: N output and K input features; T = ceil(N / 16) row tiles, B = ceil(K / 256) column blocks, G groups
of a column block: 8 of 32 columns, or 16 of 16.

    w[n, k] = value(code[n, k]) * scale[n, group] - minimum[n, group]

in fp32 and in this order, as ggml's own dequantization rounds. A code's value is `code - offset`, or an entry
of a table. A scale is an fp16 number, or such a number of 256 columns times an integer of the group: its
product has up to 18 bits, so the two are kept apart. The same holds for minimums.

A code of 3, 5 or 6 bits is cut in two planes, so that each has 1, 2, 4 or 8 bits. A tile of a plane of b bits
is 512 bytes, one for each of 16 rows and 32 columns, and holds 8 / b times 32 columns of the block, the first
in the lowest bits. Its bytes are in the order of the left operand of `mma`, 16 for each lane:

    row % 8, quad (column / 2 % 4), half (column / 16), upper (row / 8), pair (column / 8 % 2), column % 2

The highest bit of a code with an offset is stored inverted, which makes `code - offset` a signed number. Of a
row, all factors or scales of half a column block are a word, or two, so that a lane reads them at once.
Rows and columns beyond the weight have scale and minimum 0.

NVFP4 has e2m1 codes, an e4m3 scale for 16 columns, and an fp32 number for each row: (value * scale) * number,
of which only the second product is rounded. Two bytes of a tile hold the four neighbors of a lane in the first
32 columns, and two those in the second 32. So 16 bits select four values of a table at once:

    row % 8, quad, half, upper (row / 8), field (column / 32 % 2), pair, column % 2 (of four bits)
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from localchat_cuda.ggml_forms import (
    BLOCK,
    FORMS,
    GGUF_FORMS,
    INT8,
    INT8_ZEROS,
    NVFP4,
    ROWS,
    GgmlForm,
)
from localchat_cuda.kernels.ggml.blocks import SplitRows, split

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 codes 0 to 7. Bit 3 is the sign."""
_SLICE_ROWS = 2048
_TILE = 512


class GgmlTensor(NamedTuple):
    """A repacked weight of one number format."""

    type: str
    """Name of the number format, one of ggml_forms.FORMS."""
    features_out: int
    features_in: int
    low: torch.Tensor
    """int8 [T, B, bits, 512]."""
    high: torch.Tensor | None
    """Upper bits of codes of 3, 5 or 6 bits, as `low`."""
    sides: torch.Tensor
    """int64 or int32 [T, 2B, words, 16]: factors int8 of the groups, those of scales before those of minimums,
    or four bits each with codes of 2 bits; without factors fp16 scales, and in a second word minimums."""
    scales: torch.Tensor | None
    """int32 [T, B, 16]: with factors, the fp16 number of scales in the lower half, of minimums above.

    NVFP4: fp32 [T, 16], the numbers of the rows."""

    @property
    def form(self) -> GgmlForm:
        return FORMS[self.type]


class GgmlWeight(NamedTuple):
    """A weight of a gemm. Its parts along N may have different formats."""

    parts: tuple[GgmlTensor, ...]
    order: torch.Tensor | None = None
    """int32 [K]: packed column k is column order[k] of the layer (act-order). None: as in the layer."""
    unpacked: torch.Tensor | None = None
    """The weight [N, K] in floating point, too, where memory is plentiful: for steps of many rows."""

    @property
    def group(self) -> int:
        """Number of Int8Rows that are multiplied with any of these formats."""
        return 16

    @property
    def features_out(self) -> int:
        return sum(part.features_out for part in self.parts)

    @property
    def features_in(self) -> int:
        return self.parts[0].features_in


def empty(type_: str, n: int, k: int, device: torch.device) -> GgmlTensor:
    """Allocate a repacked weight of N x K without setting its numbers."""
    form = FORMS[type_]
    t = -(-n // ROWS)
    b = -(-k // BLOCK)
    groups = BLOCK // form.group
    both = 2 if form.minimum else 1
    # Bytes of sides in half a block of a row.
    size = groups
    if not form.factors and not form.floats:
        size *= 2 * both
    elif form.group == 32:
        size *= both
    words = torch.int64 if size >= 16 else torch.int32

    def room(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(t, *shape, dtype=dtype, device=device)

    low, high = (room(torch.int8, b, bits, _TILE) if bits else None for bits in form.planes)
    assert low is not None
    sides = room(words, 2 * b, max(1, size // 16), ROWS)
    scales = None
    if form.factors:
        scales = room(torch.int32, b, ROWS)
    elif form.floats:
        scales = room(torch.float32, ROWS)
    return GgmlTensor(type_, n, k, low, high, sides, scales)


def pack(type_: str, raw: torch.Tensor, k: int) -> GgmlTensor:
    """Repack the stored bytes uint8 [N, row bytes] of a tensor with K columns.

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
    times, remainder = divmod(k // scales.shape[1], FORMS[INT8].group)
    if remainder:
        raise ValueError(f"groups: multiples of 32 columns wanted, {k // scales.shape[1]} given")
    wide = scales.half().repeat_interleave(times, 1)
    if zeros is None:
        rows = map(SplitRows, codes.split(_SLICE_ROWS), wide.split(_SLICE_ROWS))
        return _packed(INT8, rows, n, k)
    minimums = ((zeros.float() - 128) * scales.float()).half().repeat_interleave(times, 1)
    parts = (part.split(_SLICE_ROWS) for part in (codes, wide, minimums))
    some = (
        SplitRows(part, scale, None, minimum) for part, scale, minimum in zip(*parts, strict=True)
    )
    return _packed(INT8_ZEROS, some, n, k)


def pack_nvfp4(codes: torch.Tensor, scales: torch.Tensor, number: torch.Tensor) -> GgmlTensor:
    """Pack codes uint8 [N, K / 2], scales [N, K / 16] and one fp32 number; exact.

    A byte has two codes, the first in its lower bits. Scales are e4m3 without a sign.
    """
    n = codes.shape[0]
    k = 2 * codes.shape[1]
    bytes_of_scales = scales.view(torch.int8)
    rows = (
        SplitRows(
            torch.stack((part & 15, part >> 4), 2).flatten(1),
            number.float().reshape(1).expand(len(part)),
            factors,
        )
        for part, factors in zip(
            codes.split(_SLICE_ROWS), bytes_of_scales.split(_SLICE_ROWS), strict=True
        )
    )
    return _packed(NVFP4, rows, n, k)


def _packed(type_: str, some: Iterable[SplitRows], n: int, k: int) -> GgmlTensor:
    slices = [_pack_rows(FORMS[type_], rows) for rows in some]
    low, high, sides, scales = (_joined(column) for column in zip(*slices, strict=True))
    assert low is not None
    assert sides is not None
    return GgmlTensor(type_, n, k, low, high, sides, scales)


def _joined(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    if len(present) == 1:
        return present[0]
    if present:
        return torch.cat(present)
    return None


def with_neighbours_joined(parts: Sequence[GgmlTensor]) -> tuple[GgmlTensor, ...]:
    """Join neighbours of one format along N, where tiles of rows allow it: fewer launches."""
    result = [parts[0]]
    for part in parts[1:]:
        last = result[-1]
        if last.type != part.type or last.features_out % ROWS:
            result.append(part)
            continue
        pairs = zip(
            (last.low, last.high, last.sides, last.scales),
            (part.low, part.high, part.sides, part.scales),
            strict=True,
        )
        low, high, sides, scales = (_joined(pair) for pair in pairs)
        assert low is not None
        assert sides is not None
        n = last.features_out + part.features_out
        result[-1] = GgmlTensor(part.type, n, part.features_in, low, high, sides, scales)
    return tuple(result)


def _pack_rows(form: GgmlForm, rows: SplitRows) -> tuple[torch.Tensor | None, ...]:
    low_bits, high_bits = form.planes
    codes = _padded(rows.codes, BLOCK) ^ form.offset
    if form.floats:
        assert rows.factors is not None
        sides = _words(rows.factors, BLOCK // form.group, 2, torch.int64)
        numbers = _padded(rows.scales[:, None], 1).reshape(-1, ROWS)
        return _plane_in_fields(codes), None, sides, numbers.contiguous()
    low = _plane(codes & ((1 << low_bits) - 1), low_bits)
    high = _plane(codes >> low_bits, high_bits) if high_bits else None
    if rows.factors is None:
        both = [rows.scales] if rows.minimums is None else [rows.scales, rows.minimums]
        words = [_words(plane, BLOCK // form.group, 2, torch.int64) for plane in both]
        return low, high, torch.cat(words, 2), None
    factors = rows.factors
    per_half = BLOCK // form.group // 2
    if rows.minimum_factors is not None and per_half == 8:
        factors = factors | (rows.minimum_factors << 4)
    elif rows.minimum_factors is not None:
        pair = (factors, rows.minimum_factors)
        factors = torch.cat([plane.view(len(plane), -1, per_half) for plane in pair], 2).flatten(1)
        per_half *= 2
    sides = _words(factors, 2 * per_half, 2, torch.int64 if per_half == 8 else torch.int32)
    minimums = rows.minimums
    if minimums is None:
        minimums = torch.zeros_like(rows.scales)
    scales = torch.stack((rows.scales, minimums), 2).flatten(1)
    return low, high, sides, _words(scales, 2, 1, torch.int32)[:, :, 0].contiguous()


def _padded(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Zeros behind the last row and column up to whole tiles."""
    n, k = tensor.shape
    rows = -(-n // ROWS) * ROWS
    wide = -(-k // columns) * columns
    if (rows, wide) == (n, k):
        return tensor
    return torch.nn.functional.pad(tensor, (0, wide - k, 0, rows - n))


def _words(fields: torch.Tensor, per_block: int, units: int, dtype: torch.dtype) -> torch.Tensor:
    """Convert [N, values] to words of a `units`-th of a column block per row: [T, units * B, words, 16]."""
    padded = _padded(fields, per_block)
    t = len(padded) // ROWS
    b = padded.shape[1] // per_block
    flat = padded.clone(memory_format=torch.contiguous_format).view(-1).view(dtype)
    return flat.view(t, ROWS, units * b, -1).permute(0, 2, 3, 1).contiguous()


def _unworded(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Invert `_words`: [16 T, units * B, values]."""
    t, units, _, rows = words.shape
    return words.permute(0, 3, 1, 2).flatten().view(dtype).view(t * rows, units, -1)


def _plane(values: torch.Tensor, bits: int) -> torch.Tensor:
    n, k = values.shape
    t = n // ROWS
    b = k // BLOCK
    fields = 8 // bits
    #                  t  upper row b tile  field  half pair quad e
    tiles = values.view(t, 2, 8, b, bits, fields, 2, 2, 4, 2)
    result = torch.zeros_like(tiles[:, :, :, :, :, 0])
    for field in range(fields):
        result |= tiles[:, :, :, :, :, field] << (bits * field)
    #                       t  b tile row quad half upper pair e
    ordered = result.permute(0, 3, 4, 2, 7, 5, 1, 6, 8)
    return ordered.reshape(t, b, bits, _TILE).view(torch.int8)


def _plane_in_fields(values: torch.Tensor) -> torch.Tensor:
    """Return `_plane` of four bits with separate bytes for each field."""
    n, k = values.shape
    t = n // ROWS
    b = k // BLOCK
    #                  t  upper row b tile field half pair quad e
    tiles = values.view(t, 2, 8, b, 4, 2, 2, 2, 4, 2)
    result = tiles[..., 0] | (tiles[..., 1] << 4)
    #                       t  b tile row quad half upper field pair
    ordered = result.permute(0, 3, 4, 2, 8, 6, 1, 5, 7)
    return ordered.reshape(t, b, 4, _TILE).view(torch.int8)


def _codes_of_fields(plane: torch.Tensor) -> torch.Tensor:
    """Invert `_plane_in_fields`: uint8 [16 T, 256 B]."""
    t, b = plane.shape[:2]
    ordered = plane.view(torch.uint8).view(t, b, 4, 8, 4, 2, 2, 2, 2)
    both = torch.stack((ordered & 15, ordered >> 4), 9)
    # From t b tile row quad half upper field pair e.
    return both.permute(0, 6, 3, 1, 2, 7, 5, 8, 4, 9).reshape(t * ROWS, b * BLOCK)


def _unplaned(plane: torch.Tensor, bits: int) -> torch.Tensor:
    """Invert `_plane`: uint8 [16 T, 256 B]."""
    t, b = plane.shape[:2]
    ordered = plane.view(torch.uint8).view(t, b, bits, 8, 4, 2, 2, 2, 2)
    result = ordered.permute(0, 6, 3, 1, 2, 5, 7, 4, 8)  # t upper row b tile half pair quad e
    mask = (1 << bits) - 1
    fields = [(result >> (bits * field)) & mask for field in range(8 // bits)]
    return torch.stack(fields, dim=5).reshape(t * ROWS, b * BLOCK)


def _sides(weight: GgmlTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and minimums fp32 [16 T, groups]."""
    form = weight.form
    if form.floats:
        return _unworded(weight.sides, torch.float8_e4m3fn).float().flatten(1), None
    if weight.scales is None:
        scales, *minimums = (
            _unworded(weight.sides[:, :, i : i + 1], torch.float16).flatten(1).float()
            for i in range(weight.sides.shape[2])
        )
        return scales, minimums[0] if minimums else None
    factors = _unworded(weight.sides, torch.int8)
    numbers = _unworded(weight.scales[:, :, None], torch.float16).float()
    if not form.minimum:
        return _times(numbers[:, :, 0], factors), None
    if form.group == 16:
        pair = factors & 15, (factors >> 4) & 15
    else:
        pair = factors[:, :, :4], factors[:, :, 4:]
    return _times(numbers[:, :, 0], pair[0]), _times(numbers[:, :, 1], pair[1])


def _times(numbers: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Numbers [R, B] times factors [R, 2B, groups of half a block]: [R, all groups]."""
    wide = factors.float() * numbers.repeat_interleave(2, 1)[:, :, None]
    return wide.flatten(1)


def dense(weight: GgmlTensor | GgmlWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight [N, K] in floating point, with columns as packed.

    Bit-equal to ggml's result in fp32. It is the reference of the gemms.
    """
    if isinstance(weight, GgmlWeight):
        return torch.cat([dense(part, dtype) for part in weight.parts])
    form = weight.form
    low_bits, high_bits = form.planes
    if form.floats:
        codes = _codes_of_fields(weight.low)
    else:
        codes = _unplaned(weight.low, low_bits)
    if weight.high is not None:
        codes |= _unplaned(weight.high, high_bits) << low_bits
    if form.table:
        table = torch.tensor(TABLE, dtype=torch.float32, device=codes.device)
        values = table[codes.long()]
    elif form.floats:
        table = torch.tensor(E2M1, device=codes.device)
        values = torch.where(codes > 7, -1.0, 1.0) * table[(codes & 7).long()]
    else:
        values = (codes ^ form.offset).float() - form.offset
    scales, minimums = _sides(weight)
    result = values.mul_(scales.repeat_interleave(form.group, 1))
    if minimums is not None:
        result -= minimums.repeat_interleave(form.group, 1)
    if form.floats:
        assert weight.scales is not None
        result *= weight.scales.view(-1, 1)
    return result[: weight.features_out, : weight.features_in].to(dtype)
