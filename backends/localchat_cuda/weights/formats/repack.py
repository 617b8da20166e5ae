"""Converts codes, scales, zeros and groups of the formats of 4 and 8 bits to the packed forms.

Letters: N output and K input features, G groups of the checkpoint along K.

A group of the packed form is a run of 32, 64 or 128 columns. A checkpoint's group may be longer: then a scale
and a zero are repeated. It may also be scattered (act-order): then columns are sorted by their group, and the
weight records the order of its activations.
"""

import torch

from localchat.errors import ModelInvalid
from localchat_cuda.config.quantization import INT8_BITS, PACKED_GROUPS
from localchat_cuda.kernels.ggml import pack as ggml_pack
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.weights.values import all_true

INT8_MIDDLE = 128
"""Zero of symmetric codes of 8 bits."""


def unpack_codes(words: torch.Tensor, axis: int, bits: int) -> torch.Tensor:
    """Unpack int32 words of 32 / bits codes along `axis` (0 or 1), lowest bits first, to uint8."""
    # One place after the other: all at once would take eight bytes of scratch for each code.
    mask = (1 << bits) - 1
    each = [((words >> shift) & mask).to(torch.uint8) for shift in range(0, 32, bits)]
    return torch.stack(each, axis + 1).flatten(axis, axis + 1)


def column_order(prefix: str, groups: torch.Tensor | None, size: int) -> torch.Tensor | None:
    """The order (int64 [K]) that makes runs of the groups; None if they are runs already.

    `groups`: the number of each column's group [K]; all -1, as compressed-tensors initializes it, means none.
    `size`: columns of a group. Raises ModelInvalid for groups of any other size."""
    if groups is None or all_true(groups == -1, on_meta=False):
        return None
    k = groups.shape[0]
    found = groups.to(torch.int64)
    natural = torch.arange(k, device=groups.device) // size
    if all_true(found == natural, on_meta=False):
        return None
    order = torch.argsort(found, stable=True)
    if not all_true(found[order] == natural, on_meta=True):
        raise ModelInvalid(
            f"{prefix}: its g_idx does not name {k // size} groups of {size} columns each.",
            hint="The checkpoint is damaged or of an unknown kind: take another quantization of the model.",
        )
    return order


def pack_weight(
    prefix: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    order: torch.Tensor | None,
    bits: int,
    *,
    symmetric: bool,
) -> w4_pack.W4 | ggml_pack.GgmlWeight:
    """Pack a weight. `codes` uint8 [N, K], their columns sorted by `order` already; `scales` and `zeros`
    [N, G], of groups that group_size allows. `symmetric`: zeros are in the middle by config.json, which
    counts only for tensors without numbers. Raises ModelInvalid for shapes that the gemms do not take."""
    if bits == INT8_BITS:
        middle = all_true(zeros == INT8_MIDDLE, on_meta=symmetric)
        tensor = ggml_pack.pack_int8(codes, scales, None if middle else zeros)
        return ggml_pack.GgmlWeight((tensor,), None if order is None else order.to(torch.int32))
    size = codes.shape[1] // scales.shape[1]
    times = size // next((each for each in PACKED_GROUPS if size % each == 0), size)
    if times > 1:
        scales, zeros = (each.repeat_interleave(times, 1) for each in (scales, zeros))
    padding = 0
    try:
        if order is None:
            codes, scales, zeros, padding = w4_pack.with_columns(codes, scales, zeros)
        found = w4_pack.pack(codes, scales, zeros)._replace(padding=padding)
    except ValueError as error:
        raise ModelInvalid(
            f"{prefix} cannot be packed: {error}.",
            hint="4-bit layers need inputs in 32s, with act-order in 128s, and outputs in 16s here.",
        ) from error
    if order is None:
        return found
    return found._replace(order=order.to(torch.int32))


def group_size(prefix: str, k: int, group: int) -> int:
    """Columns of a group in a layer of K (`group` 0: all). Raises ModelInvalid if they do not divide K."""
    size = group or k
    if k % size or size % PACKED_GROUPS[-1]:
        raise ModelInvalid(
            f"{prefix}: {k} inputs in groups of {size} cannot be packed.",
            hint=f"Quantized layers need groups of multiples of {PACKED_GROUPS[-1]} that divide their inputs.",
        )
    return size
