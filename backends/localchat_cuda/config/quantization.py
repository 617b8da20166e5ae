"""Reads the quantization_config of a checkpoint's config.json. Imports no torch.

Letters: N output and K input features of a layer.

The record contains what a format (weights/formats/) needs beyond the tensors, and what the memory plan needs
before they are read. Supported writers: transformers, AutoAWQ, AutoGPTQ, GPTQModel, AutoRound, llm-compressor,
ModelOpt.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from localchat.errors import ModelInvalid
from localchat.fit.load_options import RoundedType
from localchat.model_files.safetensors import Tensor
from localchat_cuda.ggml_forms import GGUF_FORMS, INT8, INT8_ZEROS, NVFP4, packed_bytes

Method = Literal["awq", "gptq", "packed", "int8", "fp8", "gguf", "mxfp4", "mxfp8", "nvfp4"]
Unsupported = Callable[[str], ModelInvalid]
"""Function that makes the error for an unsupported setting. Its text completes a sentence."""

PACKED_GROUPS = (128, 64, 32)
"""Input features that share a scale and a zero in the packed form (kernels/int4/pack.py), largest first."""
_FP8_BLOCK = 128
"""Output and input features of a block that shares a scale."""
STORED = "bf16, fp16, fp32, AWQ, GPTQ, compressed-tensors' 4 or 8 bits, FP8, MXFP8, NVFP4 or (gpt-oss) MXFP4"
"""Supported storage of a layer, for messages."""
_SCALE_BYTES = 4
"""Bytes of one scale of FP8 weights."""
INT8_BITS = 8
_SOLVED = {"fp8": 116, "int8": 112}
"""HumanEval problems that Qwen2.5-Coder-1.5B solves with layers rounded to this type. In bf16 it solves 118."""
_ROUNDED_ROWS = 16
"""Output features of a rounded layer are a multiple of this number."""
_MX_GROUP = 32
_NVFP4_GROUP = 16
"""Input features that share a scale in MXFP8 and NVFP4."""
_FLOAT_GROUPS = {"mxfp8": _MX_GROUP, "nvfp4": _NVFP4_GROUP}
_PACKED_TENSORS: dict[Method, str | tuple[str, ...]] = {
    "awq": ".qweight",
    "gptq": ".qweight",
    "packed": ".weight_packed",
    "int8": ".weight",
    "mxfp8": ".weight",
    "nvfp4": (".weight_packed", ".weight"),
}
"""Names of the tensor of codes, by method."""
_CODE_TYPES = {"int8": "I8", "mxfp8": "F8_E4M3", "nvfp4": "U8"}
"""Types of codes whose tensors have the names of floating ones, by method."""
_SIDE_TENSORS = (
    ".qzeros",
    ".scales",
    "_scale",
    "_scale_2",
    "_zero_point",
    ".weight_shape",
    "g_idx",
)
"""Names of tensors that belong to the codes and are counted with them."""

_MXFP4_TENSORS = ("_blocks", "_scales", "gate_up_proj_bias")
"""Names of the tensors of quantized experts whose size changes."""
_SCALE_NAMES = ("_scale", "_scale_inv")
"""Names of the scales of FP8 weights."""
_FLOATING = ("F64", "F32", "F16", "BF16")
"""Types of tensors that the load converts to the type of the model."""


def floating_bytes(tensor: Tensor, float_bytes: int) -> int:
    """Return the bytes of a loaded tensor: `float_bytes` per floating number, other types as stored."""
    if is_floating(tensor):
        return prod(tensor.shape) * float_bytes
    return tensor.size_bytes


@dataclass(frozen=True, slots=True)
class Quantization:
    """Storage of the quantized layers. Tensors show which layers are quantized, not this record."""

    method: Method
    """Method whose layout the tensors have."""
    bits: int = 4
    """Bits of a weight."""
    group: int = PACKED_GROUPS[0]
    """Input features that share a scale; 0: all of them."""
    symmetric: bool = False
    act_order: bool = False
    """Groups are scattered over the columns."""
    zeros_minus_one: bool = False
    """The config claims that zeros are stored minus one."""
    fp8_activations: bool = False
    """Gemms of many rows may round activations to FP8, for which the checkpoint was made."""
    on_load: bool = False
    """The checkpoint is floating. Its layers are rounded while they are read."""
    mix: str = ""
    """Name of a GGUF file's mix of formats, such as Q4_K_M; empty for other checkpoints."""
    head: str = ""
    """Number format of the head of a GGUF file; empty: floating."""

    @property
    def packed(self) -> bool:
        """True if layers become 4-bit codes in the order of the int4 gemms."""
        return self.bits == 4 and not self.of_experts and self.method != "nvfp4"

    @property
    def of_experts(self) -> bool:
        """True if experts alone are quantized, in groups of 32 floating numbers of four bits."""
        return self.method == "mxfp4"

    @property
    def label(self) -> str:
        """Name of the format for display, such as AWQ 4-bit or FP8."""
        if self.mix:
            return self.mix
        if self.on_load:
            return f"rounded to {self.rounded_type}"
        if self.method == "packed":
            return f"compressed-tensors {self.bits}-bit"
        if self.method in ("awq", "gptq"):
            return f"{self.method.upper()} {self.bits}-bit"
        return self.method.upper()

    @property
    def rounded_type(self) -> str:
        """Type that layers are rounded to at the load, as `--quantize` names it."""
        return "fp8" if self.method == "fp8" else f"int{self.bits}"

    @property
    def load_note(self) -> str:
        """Notice that layers are rounded at the load, with a measured loss of quality."""
        note = f"The layers are {self.label} while they are read."
        solved = _SOLVED.get(self.rounded_type)
        if solved is None:
            return note
        return (
            f"{note} This can lower quality: Qwen2.5-Coder-1.5B solves {solved} of 164 HumanEval problems, "
            "and 118 in bf16."
        )

    @property
    def in_ggml_forms(self) -> bool:
        """True if layers are repacked for the gemms of ggml's formats."""
        if self.method == "nvfp4":
            return True
        return self.bits == INT8_BITS and self.method not in ("fp8", "mxfp8")

    @property
    def packed_group(self) -> int:
        """Input features of one scale in the packed form. A checkpoint's group is a multiple of it."""
        return next(size for size in PACKED_GROUPS if self.group % size == 0)

    def linear_bytes(self, n: int, k: int) -> int:
        """Return the bytes of a loaded layer of N x K weights."""
        if self.of_experts:
            return n * padded(k) * (16 + 1) // PACKED_GROUPS[-1]
        order_bytes = 4 * k if self.act_order else 0
        if self.method == "nvfp4":
            return packed_bytes(NVFP4, n, k)
        if self.method == "mxfp8":
            return n * padded(k) * (_MX_GROUP + 1) // _MX_GROUP
        if self.in_ggml_forms:
            type_ = INT8 if self.symmetric else INT8_ZEROS
            return packed_bytes(type_, n, k) + order_bytes
        k = padded(k)
        if self.packed:
            return n * k // 2 + _side_bytes(n, k, self.packed_group) + order_bytes
        scales = n
        if self.group:
            scales = -(-n // self.group) * -(-k // self.group)
        return n * k + scales * _SCALE_BYTES

    def loaded_bytes(self, tensor: Tensor, float_bytes: int) -> int:
        """Return the bytes of a stored tensor once loaded. `float_bytes`: of a floating number.

        Codes stay as stored. Scales and zeros of packed layers are counted with the codes. FP8 layers take four
        bytes for every scale."""
        if self.on_load:
            shape = _rounded_shape(tensor)
            if shape is not None:
                return self.linear_bytes(*shape)
            return floating_bytes(tensor, float_bytes)
        if self.of_experts and tensor.name.endswith(_MXFP4_TENSORS):
            return self._mxfp4_bytes(tensor, float_bytes)
        if self.method not in _PACKED_TENSORS:
            is_scale = tensor.name.endswith(_SCALE_NAMES)
            return floating_bytes(tensor, _SCALE_BYTES if is_scale else float_bytes)
        if tensor.name.endswith(_SIDE_TENSORS):
            return 0
        shape = self._layer_shape(tensor)
        if shape is None:
            return floating_bytes(tensor, float_bytes)
        return self.linear_bytes(*shape)

    def objection(self, tensor: Tensor) -> str:
        """Return the reason why a stored layer cannot be loaded. Empty if it can."""
        if self.on_load:
            return ""
        shape = self._layer_shape(tensor)
        if shape is None:
            return ""
        n, k = shape
        if self.method in _FLOAT_GROUPS and k % PACKED_GROUPS[-1]:
            return f"{tensor.name} has {k} inputs, and {self.label} layers need multiples of 32"
        if self.method in _FLOAT_GROUPS:
            return ""
        group = self.group or k
        if k % group or group % PACKED_GROUPS[-1]:
            return f"{tensor.name} has {k} inputs, which groups of {group} do not divide"
        if self.packed and n % _ROUNDED_ROWS:
            return f"{tensor.name} has {n} outputs, and the 4-bit kernels need multiples of 16"
        unpadded = self.packed and (self.act_order or "expert" in tensor.name)
        if unpadded and k % PACKED_GROUPS[0]:
            kind = "act-order layers" if self.act_order else "experts"
            return f"{tensor.name} has {k} inputs, and {kind} need multiples of 128"
        return ""

    def _layer_shape(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return N and K of the layer whose integer codes a tensor holds; None for other tensors."""
        suffix = _PACKED_TENSORS.get(self.method)
        if suffix is None or not tensor.name.endswith(suffix) or len(tensor.shape) != 2:
            return None
        if tensor.dtype != _CODE_TYPES.get(self.method, tensor.dtype):
            return None
        rows, words = tensor.shape
        in_word = 32 // self.bits
        if self.method in _CODE_TYPES:
            in_word = 8 // self.bits
        shapes = {"awq": (in_word * words, rows), "gptq": (words, in_word * rows)}
        return shapes.get(self.method, (rows, in_word * words))

    def _mxfp4_bytes(self, tensor: Tensor, float_bytes: int) -> int:
        """Return the bytes of codes or biases of experts. Scales are counted with the codes."""
        if tensor.name.endswith("_scales"):
            return 0
        experts, rows = tensor.shape[:2]
        if "gate_up" in tensor.name:
            # Gate and up are padded, each by itself.
            rows = 2 * padded(rows // 2)
        if tensor.name.endswith("_bias"):
            return experts * rows * float_bytes
        return self.linear_bytes(experts * rows, tensor.shape[2] * PACKED_GROUPS[-1])


def quantized_head(prefix: str) -> ModelInvalid:
    """Return the error for a head in codes, for which no gemm exists."""
    return ModelInvalid(
        f"{prefix} is quantized like the layers, and only a floating head can be loaded.",
        hint="Use a checkpoint whose head is not quantized, or a GGUF file.",
    )


def is_floating(tensor: Tensor) -> bool:
    """Return True for a tensor of floating numbers, which are not codes."""
    return tensor.dtype in _FLOATING


def padded(columns: int) -> int:
    """Return the columns of a packed weight, padded to a multiple of 128."""
    return -(-columns // PACKED_GROUPS[0]) * PACKED_GROUPS[0]


def can_round(name: str, n: int, k: int) -> bool:
    """Return True if the gemms support a rounded layer of N x K.

    Experts are not padded to a multiple of 128 columns."""
    columns = PACKED_GROUPS[0] if "expert" in name else PACKED_GROUPS[-1]
    return n % _ROUNDED_ROWS == 0 and k % columns == 0


def _rounded_shape(tensor: Tensor) -> tuple[int, int] | None:
    """Return N and K of a layer that the load rounds. N counts the rows of all experts."""
    if ".layers." not in tensor.name:
        return None
    match tensor.shape:
        case (n, k) if tensor.name.endswith(".weight") and can_round(tensor.name, n, k):
            return n, k
        case (experts, n, k) if can_round("experts", n, k):
            return experts * n, k
    return None


def rounding(to: RoundedType) -> Quantization:
    """Return the format to which `--quantize` rounds a floating checkpoint."""
    if to == "fp8":
        return Quantization("fp8", 8, 0, symmetric=True, on_load=True)
    if to == "int8":
        return Quantization("packed", 8, symmetric=True, on_load=True)
    return Quantization("packed", 4, on_load=True)


def _side_bytes(n: int, k: int, group: int) -> int:
    """Return the bytes of packed scales and zeros."""
    groups = k // group
    if group == PACKED_GROUPS[0]:
        return 4 * n * groups
    # Smaller groups take two bytes for a scale, and eight groups share four bytes of zeros.
    return n * (2 * groups + 4 * -(-groups // 8))


def parse_quantization(raw: object, name: str, unsupported: Unsupported) -> Quantization | None:
    """Parse a quantization_config. None if the config has none. Raises ModelInvalid that names the file."""
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise ModelInvalid(f"{name}: quantization_config is {raw!r}, not an object.")
    method = str(raw.get("quant_method")).lower()
    parser = _PARSERS.get(method)
    if parser is None:
        stated = raw.get("quant_method")
        bits = raw.get("bits")
        problem = (
            f"weights quantized as {stated}" if stated else "weights quantized by an unnamed method"
        )
        if bits:
            problem = f"{problem}, {bits} bits"
        raise unsupported(problem)
    return parser(raw, unsupported)


def _awq(raw: Mapping[str, Any], unsupported: Unsupported) -> Quantization:
    bits = raw.get("bits")
    size = raw.get("group_size")
    version = str(
        raw.get("version") or raw.get("checkpoint_format") or raw.get("format") or "gemm"
    ).lower()
    if bits != 4 or version != "gemm":
        raise unsupported(f"weights quantized as awq, {bits or 'unknown'} bits, version {version}")
    if size not in PACKED_GROUPS or not raw.get("zero_point", True):
        raise unsupported(f"AWQ in groups of {size} (supported: 32, 64 or 128 with zero points)")
    return Quantization("awq", group=size)


def _gptq(raw: Mapping[str, Any], unsupported: Unsupported) -> Quantization:
    bits = raw.get("bits")
    layout = str(raw.get("checkpoint_format") or raw.get("format") or "gptq").lower()
    if bits not in (4, INT8_BITS):
        raise unsupported(f"GPTQ with {bits or 'unknown'} bits (supported: 4 and 8)")
    if layout not in ("gptq", "gptq_v2") or raw.get("is_marlin_format"):
        if raw.get("is_marlin_format"):
            layout = "marlin"
        raise unsupported(f"GPTQ packed for {layout}")
    if raw.get("lm_head"):
        raise unsupported("GPTQ with a quantized head")
    group = _group(raw.get("group_size"), "GPTQ", unsupported)
    _check_overrides(raw.get("dynamic"), bits, group, unsupported)
    return Quantization(
        "gptq",
        bits,
        group=group,
        symmetric=bool(raw.get("sym", True)),
        act_order=bool(raw.get("desc_act")) and not raw.get("static_groups") and group > 0,
        zeros_minus_one=layout != "gptq_v2",
    )


def _check_overrides(overrides: object, bits: int, group: int, unsupported: Unsupported) -> None:
    """Reject GPTQModel's settings of single layers that have another format. Layers may stay floating."""
    if not isinstance(overrides, dict):
        return
    for pattern, settings in overrides.items():
        # A leading "-:" excludes layers from quantization.
        if str(pattern).startswith("-:") or not isinstance(settings, dict):
            continue
        size = settings.get("group_size", group or -1)
        if settings.get("bits", bits) != bits or size != (group or -1):
            raise unsupported(f"layers {pattern} quantized otherwise than the rest")


def _auto_round(raw: Mapping[str, Any], unsupported: Unsupported) -> Quantization:
    """Parse a config of AutoRound, which writes the layouts of AWQ or GPTQ."""
    packing = str(raw.get("packing_format") or raw.get("backend") or "auto_round:auto_gptq")
    if "awq" in packing:
        return _awq({**raw, "version": "gemm"}, unsupported)
    if "gptq" not in packing:
        raise unsupported(f"weights quantized as auto-round, packed for {packing}")
    return _gptq({**raw, "checkpoint_format": "gptq"}, unsupported)


def _compressed(raw: Mapping[str, Any], unsupported: Unsupported) -> Quantization:
    """Parse a config of compressed-tensors with one scheme for all layers."""
    layout = raw.get("format")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict):
        groups = {}
    schemes = [scheme for scheme in groups.values() if isinstance(scheme, dict)]
    specs = [scheme.get("weights") for scheme in schemes]
    weights = [spec for spec in specs if isinstance(spec, dict)]
    if not weights or any(spec != weights[0] for spec in weights):
        raise unsupported(f"{len(weights)} kinds of compressed weights in one model")
    if raw.get("transform_config"):
        raise unsupported("weights that were rotated (transform_config)")
    spec = weights[0]
    bits = spec.get("num_bits") or 0
    kind = spec.get("type")
    if layout == "mixed-precision":
        # Groups state their formats if they may differ.
        layout = schemes[0].get("format")
    if kind == "float" and layout in _COMPRESSED_FLOATS:
        return _compressed_floats(spec, layout, unsupported)
    if bits == 8 and kind == "float":
        fp8_activations = all(scheme.get("input_activations") for scheme in schemes)
        return _compressed_fp8(spec, unsupported, fp8_activations=fp8_activations)
    packed = layout == "pack-quantized" and bits in (4, INT8_BITS)
    plain = layout in ("int-quantized", "naive-quantized") and bits == INT8_BITS
    if not (packed or plain) or kind != "int":
        raise unsupported(f"weights compressed as {layout}, {kind} of {bits} bits")
    strategy = spec.get("strategy")
    per_tensor = plain and strategy == "tensor"
    if strategy not in ("group", "channel") and not per_tensor:
        raise unsupported(f"{bits}-bit weights with one scale for each {strategy}")
    size = spec.get("group_size") if strategy == "group" else -1
    group = _group(size, f"{bits}-bit weights", unsupported)
    return Quantization(
        "packed" if packed else "int8",
        bits,
        group=group,
        symmetric=bool(spec.get("symmetric", True)),
        act_order=spec.get("actorder") in ("group", "dynamic", True) and group > 0,
    )


def _compressed_floats(
    spec: Mapping[str, Any], layout: str, unsupported: Unsupported
) -> Quantization:
    """Parse NVFP4 or MXFP8 of compressed-tensors."""
    quantization = _COMPRESSED_FLOATS[layout]
    bits = spec.get("num_bits")
    size = spec.get("group_size")
    if bits != quantization.bits or size not in (None, quantization.group):
        raise unsupported(
            f"weights compressed as {layout}, with {bits} bits in groups of {size} "
            f"(supported: {quantization.bits} bits in groups of {quantization.group})"
        )
    if not spec.get("symmetric", True):
        raise unsupported(f"{quantization.label} weights with zero points")
    return quantization


def _compressed_fp8(
    scheme: Mapping[str, Any], unsupported: Unsupported, *, fp8_activations: bool
) -> Quantization:
    strategy = scheme.get("strategy")
    if strategy == "block":
        return _fp8_blocks(
            scheme.get("block_structure"), unsupported, fp8_activations=fp8_activations
        )
    if strategy not in ("tensor", "channel"):
        raise unsupported(f"FP8 weights with one scale for each {strategy}")
    return Quantization("fp8", 8, 0, symmetric=True, fp8_activations=fp8_activations)


def _fp8_blocks(size: object, unsupported: Unsupported, *, fp8_activations: bool) -> Quantization:
    if size != [_FP8_BLOCK, _FP8_BLOCK]:
        raise unsupported(f"FP8 weights with scales for blocks of {size} (supported: 128 x 128)")
    return Quantization("fp8", 8, _FP8_BLOCK, symmetric=True, fp8_activations=fp8_activations)


def _fp8(raw: Mapping[str, Any], unsupported: Unsupported) -> Quantization:
    """Parse FP8 with scales by block (DeepSeek), by tensor (vLLM) or by row (fbgemm)."""
    if str(raw.get("fmt") or "e4m3").lower() not in ("e4m3", "float8_e4m3fn"):
        raise unsupported(f"FP8 weights of the kind {raw.get('fmt')} (supported: e4m3)")
    size = raw.get("weight_block_size")
    if size is not None:
        return _fp8_blocks(size, unsupported, fp8_activations=True)
    return Quantization("fp8", 8, 0, symmetric=True, fp8_activations=True)


def _modelopt(raw: Mapping[str, Any], unsupported: Unsupported) -> Quantization:
    section = raw
    nested = raw.get("quantization")
    if not raw.get("quant_algo") and isinstance(nested, dict):
        section = nested
    kind = section.get("quant_algo")
    if kind == "FP8":
        return Quantization("fp8", 8, 0, symmetric=True, fp8_activations=True)
    quantization = _MODELOPT_FLOATS.get(str(kind))
    if quantization is None:
        raise unsupported(
            f"weights quantized by ModelOpt as {kind} (supported: FP8, MXFP8, NVFP4, W4A16_NVFP4)"
        )
    size = section.get("group_size")
    if size not in (None, quantization.group):
        group = quantization.group
        raise unsupported(f"{quantization.label} in groups of {size} (supported: {group})")
    return quantization


def _gguf(raw: Mapping[str, Any], unsupported: Unsupported) -> Quantization:
    """Parse the section that config/gguf.py writes: block formats of a GGUF file, one per tensor."""
    head = str(raw.get("head") or "")
    if head not in GGUF_FORMS:
        head = ""
    return Quantization("gguf", 8, 0, mix=str(raw.get("mix") or ""), head=head)


def _mxfp4(raw: Mapping[str, Any], unsupported: Unsupported) -> Quantization:
    """Parse the format of gpt-oss, whose experts alone are quantized."""
    return Quantization("mxfp4", group=PACKED_GROUPS[-1], symmetric=True)


def _group(size: object, what: str, unsupported: Unsupported) -> int:
    """Return the input features that share a scale; 0: all."""
    if size == -1:
        return 0
    if not isinstance(size, int) or size < 1 or size % PACKED_GROUPS[-1]:
        raise unsupported(
            f"{what} in groups of {size} (supported: multiples of {PACKED_GROUPS[-1]}, or -1)"
        )
    return size


_NVFP4 = Quantization("nvfp4", 4, _NVFP4_GROUP, symmetric=True)
_MXFP8 = Quantization("mxfp8", 8, _MX_GROUP, symmetric=True)
_COMPRESSED_FLOATS = {"nvfp4-pack-quantized": _NVFP4, "mxfp8-quantized": _MXFP8}
"""Formats by the `format` of compressed-tensors."""
_MODELOPT_FLOATS = {"NVFP4": _NVFP4, "W4A16_NVFP4": _NVFP4, "MXFP8": _MXFP8}
"""Formats by ModelOpt's `quant_algo`."""

_PARSERS: dict[str, Callable[[Mapping[str, Any], Unsupported], Quantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mxfp8": _modelopt,
    "gguf": _gguf,
    "mxfp4": _mxfp4,
}
"""Parsers by `quant_method` of the config."""
