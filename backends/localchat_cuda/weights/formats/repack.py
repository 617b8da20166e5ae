"""Converts codes, scales, zeros and groups of 4-bit and 8-bit formats to packed weights.

Letters: N output and K input features, G groups of the checkpoint along K.

A group of the packed form is a run of 32, 64 or 128 columns. A checkpoint's group may be longer, in which case
its scale and zero are repeated. It may also be scattered (act-order). Columns are then sorted by their group,
and the weight records the order of its activations.
"""

import torch

from localchat.errors import ModelInvalid
from localchat_cuda.config.quantization import INT8_BITS, PACKED_GROUPS, Quantization
from localchat_cuda.kernels.ggml import pack as ggml_pack
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.weights.formats.weight import all_true, refused
from localchat_cuda.weights.source import LoadTarget

INT8_MIDDLE = 128
"""Zero of symmetric codes of 8 bits."""


def unpack_codes(words: torch.Tensor, axis: int, bits: int) -> torch.Tensor:
    """Unpack int32 words to uint8 codes along `axis` (0 or 1), lowest bits first."""
    # One position at a time: all at once would need eight bytes of scratch memory for each code.
    mask = (1 << bits) - 1
    codes = [((words >> shift) & mask).to(torch.uint8) for shift in range(0, 32, bits)]
    return torch.stack(codes, axis + 1).flatten(axis, axis + 1)


def column_order(
    prefix: str, field: str, k: int, size: int, target: LoadTarget, *, act_order: bool
) -> torch.Tensor | None:
    """Return the order, int64 [K], that sorts a layer's columns by group. None: they are sorted.

    `field`: tensor with the group of each column [K], which must exist with `act_order`. All -1, the initial
    value of compressed-tensors, means unset. `size`: columns of a group. Raises ModelInvalid for groups of any
    other size."""
    name = f"{prefix}.{field}"
    if size == k or not (act_order or target.source.has(name)):
        return None
    groups = target.tensor(name, (k,), torch.int32)
    if all_true(groups == -1, on_meta=False):
        return None
    group_numbers = groups.to(torch.int64)
    natural = torch.arange(k, device=groups.device) // size
    if all_true(group_numbers == natural, on_meta=False):
        return None
    order = torch.argsort(group_numbers, stable=True)
    if not all_true(group_numbers[order] == natural, on_meta=True):
        raise ModelInvalid(
            f"{prefix}: its g_idx does not name {k // size} groups of {size} columns each.",
            hint="The checkpoint may be damaged or of an unknown kind: use another quantization of the model.",
        )
    return order


def pack_weight(
    prefix: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    quantization: Quantization,
    order: torch.Tensor | None = None,
) -> w4_pack.W4 | ggml_pack.GgmlWeight:
    """Pack a weight. Raises ModelInvalid for shapes that the gemms do not support.

    `codes`: uint8 [N, K], with columns already sorted by `order`; None: as in the layer. `scales`, `zeros`: [N,
    G], of groups that group_size allows."""
    if quantization.bits == INT8_BITS:
        in_middle = all_true(zeros == INT8_MIDDLE, on_meta=quantization.symmetric)
        tensor = ggml_pack.pack_int8(codes, scales, None if in_middle else zeros)
        weight = ggml_pack.GgmlWeight((tensor,))
        return weight if order is None else weight._replace(order=order.to(torch.int32))
    size = codes.shape[1] // scales.shape[1]
    times = size // next((packed for packed in PACKED_GROUPS if size % packed == 0), size)
    if times > 1:
        scales = scales.repeat_interleave(times, 1)
        zeros = zeros.repeat_interleave(times, 1)
    padding = 0
    hint = "4-bit layers need inputs in multiples of 32 (128 with act-order), and outputs of 16."
    with refused(f"{prefix} cannot be packed", hint):
        if order is None:
            codes, scales, zeros, padding = w4_pack.with_columns(codes, scales, zeros)
        packed_weight = w4_pack.pack(codes, scales, zeros)._replace(padding=padding)
    if order is None:
        return packed_weight
    return packed_weight._replace(order=order.to(torch.int32))


def group_size(prefix: str, k: int, group: int) -> int:
    """Return the columns of a group in a layer of K. `group` 0: all columns. Raises ModelInvalid."""
    size = group or k
    if k % size or size % PACKED_GROUPS[-1]:
        raise ModelInvalid(
            f"{prefix}: {k} inputs in groups of {size} cannot be packed.",
            hint=f"Quantized layers need groups of multiples of {PACKED_GROUPS[-1]} that divide their inputs.",
        )
    return size
