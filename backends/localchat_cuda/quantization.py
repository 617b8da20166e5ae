"""How the layers of a checkpoint are quantized, by the quantization_config of its config.json. Imports no
torch.

Letters: N output and K input features of a layer, G = K / 128 groups of the packed form.

A field of this record is what a format (formats/) needs beyond the tensors themselves, and what the plan
needs to know before they are read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localchat.errors import ModelInvalid
from localchat.fit.safetensors_header import Tensor

Method = Literal["awq", "gptq", "int4", "fp8"]
Refused = Callable[[str], ModelInvalid]
"""Makes the error of a config that asks for something; the text ends a sentence."""

PACKED_GROUP = 128
"""Input features that share a scale and a zero in the packed form (kernels/w4_pack.py)."""
_STEP_BYTES = 4
"""Of one scale and one zero there."""
_LABELS: dict[Method, str] = {"awq": "AWQ", "gptq": "GPTQ", "int4": "int4", "fp8": "FP8"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """method: whose layout the tensors have. bits: of a weight. group: input features of one scale, 0: all
    of them. Layers that config.json leaves out are told from their tensors, not from here."""

    method: Method
    bits: int = 4
    group: int = PACKED_GROUP

    @property
    def packed(self) -> bool:
        """Whether layers become 4-bit codes in the order of the W4 products."""
        return self.bits == 4

    @property
    def label(self) -> str:
        """For people: AWQ 4-bit, FP8."""
        return f"{_LABELS[self.method]} 4-bit" if self.packed else _LABELS[self.method]

    def product_bytes(self, n: int, k: int) -> int:
        """What a layer of N x K weights takes once it is loaded."""
        if self.packed:
            return n * k // 2 + n * (k // PACKED_GROUP) * _STEP_BYTES
        return n * k

    def loaded_bytes(self, tensor: Tensor) -> int:
        """What a tensor of the files takes once it is loaded: as stored, but for scales and zeros of packed
        layers, which become four bytes for each group."""
        if tensor.name.endswith(".qzeros"):
            return 0
        if tensor.name.endswith(".scales"):
            return tensor.shape[0] * tensor.shape[1] * _STEP_BYTES
        return tensor.size_bytes


def parse_quantization(raw: object, name: str, refused: Refused) -> Quantization | None:
    """The record of a quantization_config; None where there is none. Raises ModelInvalid, with what is
    wrong in the file `name`."""
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ModelInvalid(f"{name}: quantization_config is {raw!r}, no object.")
    method = raw.get("quant_method")
    parser = _PARSERS.get(str(method))
    if parser is None:
        raise refused(f"weights quantized as {method}, {raw.get('bits')} bits")
    return parser(raw, refused)


def _awq(raw: Mapping[str, Any], refused: Refused) -> Quantization:
    bits, size = raw.get("bits"), raw.get("group_size")
    if bits != 4 or str(raw.get("version", "gemm")).lower() != "gemm":
        raise refused(f"weights quantized as awq, {bits} bits, version {raw.get('version')}")
    if size != PACKED_GROUP or not raw.get("zero_point", True):
        raise refused(f"AWQ in groups of {size} (128 with zero points are possible)")
    return Quantization("awq")


_PARSERS: dict[str, Callable[[Mapping[str, Any], Refused], Quantization]] = {"awq": _awq}
"""By `quant_method`."""
