"""Writes a model as a GGUF file in another quantization, with ggml's own quantizers.

The choice of a format per tensor follows llama.cpp (src/llama-quant.cpp), so the blocks are those of
llama-quantize. One tensor is in memory at a time.
"""

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from localchat.errors import UsageError
from localchat.model_files.ggml_types import (
    FILE_TYPES,
    NUMBER_FORMATS,
    NumberFormat,
    keeps_finer_formats,
    stored_bytes,
)
from localchat.model_files.gguf import GgufTensor, Header
from localchat.model_files.open_gguf import read_header
from localchat_llamacpp.gguf_writer import ALIGNMENT, TYPE_CODES, entry, head, tensor_to_write
from localchat_llamacpp.native import library

_CHUNK_ELEMENTS: Final = 1 << 22
"""Numbers that one thread converts at once, 16 MB in float32."""
_FILE_CODES: Final = {name: code for code, name in FILE_TYPES.items()}
_QUANTIZATION_VERSION: Final = 2
"""GGML_QNT_VERSION of every block format below."""
_REPLACED: Final = frozenset(
    {"general.alignment", "general.file_type", "general.quantization_version"}
)


class _Mix(NamedTuple):
    """Number formats of a quantization: most matrices, then those that need finer ones."""

    base: str
    values: str = ""
    """Attention values of half of the layers. Empty: `base`."""
    down: str = ""
    """Down projections of half of the layers."""
    attention_out: str = ""
    joint: str = ""
    """Queries, keys and values in one matrix."""


_MIXES: Final[Mapping[str, _Mix]] = {
    "F32": _Mix("F32"),
    "F16": _Mix("F16"),
    "BF16": _Mix("BF16"),
    "Q8_0": _Mix("Q8_0"),
    "Q6_K": _Mix("Q6_K"),
    "Q5_K_M": _Mix("Q5_K", values="Q6_K", down="Q6_K", joint="Q6_K"),
    "Q5_K_S": _Mix("Q5_K"),
    "Q5_1": _Mix("Q5_1"),
    "Q5_0": _Mix("Q5_0"),
    "Q4_K_M": _Mix("Q4_K", values="Q6_K", down="Q6_K", joint="Q5_K"),
    "Q4_K_S": _Mix("Q4_K", values="Q5_K", down="Q5_K"),
    "Q4_1": _Mix("Q4_1"),
    "Q4_0": _Mix("Q4_0"),
    "IQ4_NL": _Mix("IQ4_NL", down="Q5_K"),
    "IQ4_XS": _Mix("IQ4_XS", down="Q5_K"),
    "Q3_K_L": _Mix("Q3_K", values="Q5_K", down="Q5_K", attention_out="Q5_K", joint="Q4_K"),
    "Q3_K_M": _Mix("Q3_K", values="Q5_K", down="Q5_K", attention_out="Q4_K", joint="Q4_K"),
    "Q3_K_S": _Mix("Q3_K"),
    "Q2_K": _Mix("Q2_K", values="Q3_K", down="Q3_K", attention_out="Q3_K"),
}
_WHOLE: Final = frozenset({"F32", "F16", "BF16"})
_FORMAT_OF_ODD_ROWS: Final = {
    **dict.fromkeys(("Q2_K", "Q3_K"), "Q4_0"),
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""Format for rows that the blocks of the key do not divide. F16 without an entry, or if it does not either."""
_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_ONLY_WHOLE: Final = re.compile(
    r"_norm|ffn_gate_inp|altup|laurel|per_layer_model_proj|position_embd|token_types|ssm_conv1d|"
    r"shortconv\.conv|attn_rel_b|time_mix_(first|w0|w1|w2|v0|v1|v2|a0|a1|a2|g1|g2|lerp)|rope_freqs"
)
"""Small tensors on which the answers depend much. They keep their format."""
_EXPERTS_OF_MIXTRAL: Final = 8
_MANY_LAYERS: Final = 80
"""Layers of Llama 2 and 3 with 70B parameters."""


class _Source(Protocol):
    """A model to convert."""

    header: Header
    """Metadata of the sizes, and the tensors as `stored` returns them."""

    def entries(self) -> list[bytes]:
        """Return the metadata for the new file, without file_type and quantization_version."""
        ...

    def stored(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, mapped or copied."""
        ...


class _GgufSource:
    """A GGUF file, or all parts of a split one."""

    def __init__(self, path: Path) -> None:
        """Raises ModelMissing, ModelInvalid."""
        self.header = read_header(path)
        self._parts = self.header.parts or (path,)

    def entries(self) -> list[bytes]:
        """See _Source. Copies the metadata unread."""
        entries = []
        with self._parts[0].open("rb") as file:
            for key, (start, end) in self.header.entries.items():
                if key not in _REPLACED and not key.startswith("split."):
                    file.seek(start)
                    entries.append(file.read(end - start))
        return entries

    def stored(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """See _Source."""
        path = self._parts[tensor.part]
        return np.memmap(path, np.uint8, "r", tensor.offset, (tensor.size_bytes,))


def _source(path: Path) -> _Source:
    if path.is_dir():
        from localchat_llamacpp.convert.checkpoint import CheckpointSource

        return CheckpointSource(path)
    return _GgufSource(path)


class GgufQuantizer:
    """Writes models as GGUF files in other quantizations, as llama-quantize does."""

    names = tuple(_MIXES)

    def size_bytes(self, source: Path, quantization: str) -> int:
        """Return the size of the tensors that `write` would write. Reads no weights."""
        return sum(tensor.size_bytes for tensor in _table(_source(source).header, quantization))

    def write(
        self,
        source: Path,
        target: Path,
        quantization: str,
        threads: int,
        report: Callable[[int, int], None],
    ) -> None:
        """Write `source`, a GGUF file or the folder of a checkpoint, to a new file. Remove a partial one.

        `report` gets the bytes read so far and in all. Raises LocalchatError, OSError.
        """
        model = _source(source)
        header = model.header
        table = list(_table(header, quantization))
        entries = [
            *model.entries(),
            entry("general.quantization_version", _QUANTIZATION_VERSION),
            entry("general.file_type", _FILE_CODES[quantization]),
        ]
        file = target.open("xb")
        try:
            with file, ThreadPoolExecutor(threads) as pool:
                file.write(head(entries, table))
                done_bytes = 0
                for tensor, target_tensor in zip(header.tensors, table, strict=True):
                    stored = model.stored(tensor)
                    file.write(_converted(stored, tensor, target_tensor.format, pool).data)
                    # llama.cpp expects the padding of the last tensor, too.
                    file.write(bytes(-file.tell() % ALIGNMENT))
                    done_bytes += tensor.size_bytes
                    report(done_bytes, header.weights_bytes)
        except BaseException:
            target.unlink(missing_ok=True)
            raise


def _table(header: Header, quantization: str) -> Iterator[GgufTensor]:
    """Yield the tensors in their new formats. Raises UsageError for an unknown quantization."""
    mix = _MIXES.get(quantization)
    if mix is None:
        raise UsageError(
            f"there is no quantization {quantization!r} to write",
            hint=f"there are {', '.join(_MIXES)}",
        )
    has_output = any(tensor.name == "output.weight" for tensor in header.tensors)
    # Files may list layer 10 before layer 2, and llama.cpp counts layers with values in their order.
    value_layers = sorted(
        _layer(tensor.name) for tensor in header.tensors if "attn_v.weight" in tensor.name
    )
    for tensor in header.tensors:
        if not _is_quantizable(tensor):
            # llama.cpp keeps these; a whole copy in F16 would not change them either.
            yield tensor
            continue
        name = _choice(tensor, header, quantization, value_layers, has_output=has_output)
        if mix.base in _WHOLE:
            name = mix.base
        yield tensor_to_write(tensor.name, tensor.shape, _dividing(name, tensor.shape[0]))


def _is_quantizable(tensor: GgufTensor) -> bool:
    is_matrix = len(tensor.shape) >= 2 and tensor.name.endswith("weight")
    return is_matrix and not _ONLY_WHOLE.search(tensor.name)


def _choice(
    tensor: GgufTensor,
    header: Header,
    quantization: str,
    value_layers: list[int],
    *,
    has_output: bool,
) -> str:
    """Return the format of a matrix in a mix, before its row width is considered."""
    mix = _MIXES[quantization]
    layers = header.number("block_count")
    layer = _layer(tensor.name)
    experts = header.number("expert_count")
    if tensor.name == "output.weight" or (
        not has_output and tensor.name in ("token_embd.weight", "per_layer_token_embd.weight")
    ):
        return _output_format(mix.base, tensor.shape[0])
    if "attn_v.weight" in tensor.name:
        return _value_format(quantization, header, value_layers.index(layer), len(value_layers))
    if "attn_k.weight" in tensor.name and experts == _EXPERTS_OF_MIXTRAL:
        return "Q8_0"
    if "ffn_down" in tensor.name and mix.down:
        return _down_format(quantization, layer, layers)
    if "attn_output.weight" in tensor.name and mix.attention_out:
        return mix.attention_out
    if "attn_qkv.weight" in tensor.name and mix.joint:
        return mix.joint
    return mix.base


def _layer(name: str) -> int:
    """Return the number of a tensor's layer, 0 for tensors outside of the layers."""
    match = _LAYER.match(name)
    return int(match[1]) if match else 0


def _output_format(base: str, width: int) -> str:
    if width % 256:
        return "Q8_0"
    return base if base == "Q8_0" else "Q6_K"


def _value_format(quantization: str, header: Header, index: int, layers: int) -> str:
    """Return the format of attention values, which few heads share."""
    mix = _MIXES[quantization]
    heads_per_value = header.number("attention.head_count") // max(
        header.number("attention.head_count_kv", 1), 1
    )
    name = mix.base
    match quantization:
        case "Q2_K":
            name = "Q4_K" if heads_per_value >= 4 else "Q3_K"
        case "Q3_K_M":
            name = "Q5_K" if index < 2 else "Q4_K"
        case "Q4_K_S":
            name = "Q5_K" if index < 4 else "Q4_K"
        case "IQ4_NL" | "IQ4_XS" if heads_per_value >= 4:
            name = "Q5_K"
        case "Q4_K_M" | "Q5_K_M":
            name = mix.values if keeps_finer_formats(index, layers) else mix.base
        case "Q3_K_L":
            name = mix.values
    if header.number("block_count") == _MANY_LAYERS and name in ("Q3_K", "Q4_K"):
        name = "Q5_K"
    if header.number("expert_count") == _EXPERTS_OF_MIXTRAL:
        name = "Q8_0"
    return name


def _down_format(quantization: str, layer: int, layers: int) -> str:
    """Return the format of down projections, finer in the first layers or in half of them."""
    mix = _MIXES[quantization]
    match quantization:
        case "Q3_K_M":
            return "Q5_K" if layer < layers // 16 else "Q4_K"
        case "Q4_K_S" | "IQ4_NL" | "IQ4_XS":
            return mix.down if layer < layers // 8 else mix.base
        case "Q4_K_M" | "Q5_K_M":
            return mix.down if keeps_finer_formats(layer, layers) else mix.base
    return mix.down


def _dividing(name: str, width: int) -> str:
    """Return the format, or another one whose blocks divide a row."""
    if width % NUMBER_FORMATS[TYPE_CODES[name]].block == 0:
        return name
    other = _FORMAT_OF_ODD_ROWS.get(name, "F16")
    if width % NUMBER_FORMATS[TYPE_CODES[other]].block:
        return "F16"
    return other


def _converted(
    stored: np.ndarray, tensor: GgufTensor, format_: NumberFormat, pool: ThreadPoolExecutor
) -> np.ndarray:
    """Return the bytes of a tensor in another format."""
    if format_ == tensor.format:
        return stored
    width = tensor.shape[0]
    rows = tensor.elements // width
    row_bytes = stored_bytes(format_, width)
    result = np.empty(rows * row_bytes, np.uint8)
    source_row_bytes = stored_bytes(tensor.format, width)
    step = max(_CHUNK_ELEMENTS // width, 1)

    def convert(first: int) -> None:
        last = min(first + step, rows)
        piece = stored[first * source_row_bytes : last * source_row_bytes]
        floats = _floats(piece, tensor.format.name, (last - first) * width)
        result[first * row_bytes : last * row_bytes] = _encoded(
            floats, format_, last - first, width
        )

    # list() raises what a thread raised.
    list(pool.map(convert, range(0, rows, step)))
    return result


def _floats(piece: np.ndarray, name: str, count: int) -> np.ndarray:
    """Return the numbers of stored blocks in float32."""
    match name:
        case "F32":
            return np.ascontiguousarray(piece).view(np.float32)
        case "F16":
            return np.ascontiguousarray(piece).view(np.float16).astype(np.float32)
        case "BF16":
            wide = np.ascontiguousarray(piece).view(np.uint16).astype(np.uint32)
            return (wide << 16).view(np.float32)
    function = _native(f"dequantize_row_{name.lower().replace('_k', '_K')}")
    if function is None:
        raise UsageError(
            f"the source has {name} weights, which this llama.cpp cannot unpack",
            hint="start from a file in F16, BF16 or Q8_0",
        )
    floats = np.empty(count, np.float32)
    blocks = np.ascontiguousarray(piece)
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function(blocks.ctypes.data, floats.ctypes.data, count)
    return floats


def _encoded(floats: np.ndarray, format_: NumberFormat, rows: int, width: int) -> np.ndarray:
    """Return rows of float32 in a format, as bytes."""
    match format_.name:
        case "F32":
            return floats.view(np.uint8)
        case "F16":
            return floats.astype(np.float16).view(np.uint8)
        case "BF16":
            bits = floats.view(np.uint32)
            # Round to nearest, ties to even, as ggml does.
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return rounded.astype(np.uint16).view(np.uint8)
    function = _native("ggml_quantize_chunk")
    if function is None:
        raise UsageError(
            "this llama.cpp library exports no quantizer",
            hint="use the one that localchat installs: --llamacpp-library xllamacpp",
        )
    function.restype = ctypes.c_size_t
    function.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ]
    encoded = np.empty(rows * stored_bytes(format_, width), np.uint8)
    function(
        TYPE_CODES[format_.name], floats.ctypes.data, encoded.ctypes.data, 0, rows, width, None
    )
    return encoded


def _native(name: str) -> Any:  # noqa: ANN401 - a function of ctypes
    """Return a function of ggml, or None if the library does not export it."""
    from localchat_llamacpp.shared_object import load

    origin = library().origin
    return getattr(load(origin.file, origin.again), name, None)
