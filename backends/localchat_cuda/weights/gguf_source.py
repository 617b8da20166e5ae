"""Source of tensors in a GGUF file, by the names of a Hugging Face checkpoint.

Tensors are read one by one.
"""

import math
from collections.abc import Mapping

import torch

from localchat.errors import ModelInvalid, reason
from localchat.model_files.gguf import GgufTensor, Header
from localchat_cuda.config.gguf import checkpoint_names, norm_offset, rotated_heads
from localchat_cuda.ggml_forms import GGUF_FORMS
from localchat_cuda.kernels.ggml import pack as ggml_pack
from localchat_cuda.weights.device_reader import DeviceReader, Extent

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SLICE_ROWS = 4096


class GgufWeights:
    """See source.WeightSource. `tensor` dequantizes matrices in block formats, and `blocks` returns them."""

    def __init__(self, header: Header, device: torch.device) -> None:
        self.header = header
        self.device = device
        self._tensors: Mapping[str, GgufTensor] = checkpoint_names(header)
        self._heads = rotated_heads(header)
        self._norm_offset = norm_offset(header)
        self._read_names: set[str] = set()
        extents = [
            Extent(header.parts[tensor.part], tensor.offset, tensor.size_bytes)
            for tensor in self._tensors.values()
        ]
        self._reader = DeviceReader(device, extents)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._tensors.get(name)
        return stored.shape[::-1] if stored is not None else ()

    def in_blocks(self, name: str) -> bool:
        """Return True for a tensor in a block format."""
        stored = self._tensors.get(name)
        return stored is not None and stored.format.name in GGUF_FORMS

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        type_, raw = self.blocks(name, shape)
        if type_ in _DTYPES:
            tensor = raw.view(_DTYPES[type_]).reshape(shape)
            if name.endswith(".A_log"):
                # llama.cpp stores the decay itself, -exp(A_log).
                tensor = torch.log(-tensor.float())
            if self._norm_offset and name.endswith("norm.weight"):
                tensor = tensor.float() - self._norm_offset
            return tensor.to(dtype)
        out = torch.empty(shape, dtype=dtype, device=self.device)
        # Slices limit the scratch memory of dequantizing an embedding.
        for first in range(0, shape[0], _SLICE_ROWS):
            rows = slice(first, first + _SLICE_ROWS)
            out[rows] = ggml_pack.dense(ggml_pack.pack(type_, raw[rows], shape[1]), dtype)
        return out

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[str, torch.Tensor]:
        """Return a tensor's number format, and its bytes on the device: uint8 [N, row bytes].

        Rows are in the order of a checkpoint. Raises ModelInvalid."""
        self._read_names.add(name)
        stored = self._tensors.get(name)
        if stored is None or not _same_shape(stored.shape[::-1], shape):
            actual = f"of the shape {stored.shape[::-1]}" if stored else "missing"
            raise ModelInvalid(
                f"{self.header.name}: the tensor {name} should have the shape {shape}, but is {actual}.",
                hint="The metadata may belong to another model: download it again, or let llama.cpp run it.",
            )
        type_ = stored.format.name
        if type_ not in GGUF_FORMS and type_ not in _DTYPES:
            raise ModelInvalid(
                f"{self.header.name}: {stored.name} is stored as {type_}, which only llama.cpp reads.",
                hint="Leave out --backend cuda: llama.cpp runs this file on the GPU too.",
            )
        rows = shape[0] if len(shape) > 1 else 1
        raw = self._bytes(stored).view(rows, -1)
        heads = self._heads.get(name.rsplit(".", 2)[-2], 0)
        if heads:
            # llama.cpp rotates neighboring columns, and a checkpoint the halves of a head.
            raw = raw.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(rows, -1)
        return type_, raw

    def unread(self) -> list[str]:
        return sorted(self._tensors.keys() - self._read_names)

    def _bytes(self, tensor: GgufTensor) -> torch.Tensor:
        path = self.header.parts[tensor.part]
        try:
            return self._reader.read(path, tensor.offset, tensor.size_bytes)
        except (OSError, ValueError) as error:
            raise ModelInvalid(
                f"{path}: {tensor.name} cannot be read: {reason(error)}.",
                hint="The file may be damaged: download it again.",
            ) from error


def _same_shape(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return True if two shapes are equal without their dimensions of 1.

    A vector may be stored in groups, as a matrix."""
    if len(shape) == 1:
        return math.prod(stored) == shape[0]
    return [n for n in stored if n != 1] == [n for n in shape if n != 1]
