"""Source of tensors: a GGUF file, its tensors by the names of a Hugging Face checkpoint.

Only the tensor that is wanted is read.
"""

from collections.abc import Mapping

import torch

from localchat.errors import ModelInvalid, reason
from localchat.model_files.gguf import GgufTensor, Header
from localchat_cuda.config.gguf import checkpoint_names, norm_offset, rotated_heads
from localchat_cuda.ggml_forms import GGUF_FORMS
from localchat_cuda.kernels.ggml import pack as ggml_pack
from localchat_cuda.weights.device_reader import DeviceReader

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SLICE_ROWS = 4096


class GgufWeights:
    """See source.WeightSource. Matrices in block formats are dequantized, unless `blocks` is called."""

    def __init__(self, header: Header, device: torch.device) -> None:
        self.header = header
        self.device = device
        self._tensors: Mapping[str, GgufTensor] = checkpoint_names(header)
        self._heads = rotated_heads(header)
        self._norm_offset = norm_offset(header)
        self._read_names: set[str] = set()
        self._reader = DeviceReader(device)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._tensors.get(name)
        return found.shape[::-1] if found is not None else ()

    def in_blocks(self, name: str) -> bool:
        """True for a tensor in a block format."""
        found = self._tensors.get(name)
        return found is not None and found.format.name in GGUF_FORMS

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        type_, raw = self.blocks(name, shape)
        if type_ in _DTYPES:
            found = raw.view(_DTYPES[type_]).reshape(shape)
            if self._norm_offset and name.endswith("norm.weight"):
                found = found.float() - self._norm_offset
            return found.to(dtype)
        out = torch.empty(shape, dtype=dtype, device=self.device)
        for first in range(0, shape[0], _SLICE_ROWS):
            rows = slice(first, first + _SLICE_ROWS)
            out[rows] = ggml_pack.dense(ggml_pack.pack(type_, raw[rows], shape[1]), dtype)
        return out

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[str, torch.Tensor]:
        """Number format and bytes of a tensor, uint8 [N, bytes of a row], on the device.

        Its rows are in a checkpoint's order. Raises ModelInvalid."""
        self._read_names.add(name)
        found = self._tensors.get(name)
        if found is None or found.shape[::-1] != shape:
            held = "lacks it" if found is None else f"it has the shape {found.shape[::-1]}"
            raise ModelInvalid(
                f"{self.header.name}: the tensor {name} should have the shape {shape}: {held}.",
                hint="The metadata may belong to another model: download it again, or let llama.cpp run it.",
            )
        if found.format.name not in GGUF_FORMS and found.format.name not in _DTYPES:
            raise ModelInvalid(
                f"{self.header.name}: {found.name} is stored as {found.format.name}; llama.cpp reads that.",
                hint="Leave out --backend cuda: llama.cpp runs this file on the GPU too.",
            )
        rows = shape[0] if len(shape) > 1 else 1
        raw = self._bytes(found).view(rows, -1)
        heads = self._heads.get(name.rsplit(".", 2)[-2], 0)
        if heads:
            # llama.cpp turns neighbours, a checkpoint the halves of a head
            raw = raw.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(rows, -1)
        return found.format.name, raw

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
