"""Source of tensors without numbers, from which compiling ahead builds a model."""

import torch

from localchat_cuda.config.gguf import CHECKPOINT_LAYER, LayerFormats
from localchat_cuda.ggml_forms import GGUF_FORMS
from localchat_cuda.weights.source import has_imagined

META = torch.device("meta")


class MetaWeights:
    """See source.WeightSource. Tensors are on torch's device `meta`, which allocates no memory."""

    def __init__(self, formats: LayerFormats = (), head_format: str = "") -> None:
        """`formats`: number formats of the kinds of layers in a GGUF file; layers take turns.

        `head_format`: of the head in the file; empty: floating."""
        self._formats = [dict(layer) for layer in formats]
        self._head_format = head_format

    def has(self, name: str) -> bool:
        if self._formats:
            return ".layers." in name and name.endswith(".weight")
        return has_imagined(name)

    def shape(self, name: str) -> None:
        return None

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    def in_blocks(self, name: str) -> bool:
        """Return True for a tensor in a block format."""
        return self._format_of(name) in GGUF_FORMS

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[str, torch.Tensor]:
        """Return a tensor's number format, and its blocks: uint8 [N, row bytes]."""
        type_ = self._format_of(name)
        form = GGUF_FORMS[type_]
        row_bytes = shape[1] // form.block * form.block_bytes
        return type_, self.tensor(name, (shape[0], row_bytes), torch.uint8)

    def unread(self) -> list[str]:
        return []

    def _format_of(self, name: str) -> str:
        match = CHECKPOINT_LAYER.fullmatch(name)
        if match is None:
            return self._head_format
        if not self._formats:
            return ""
        return self._formats[int(match[1]) % len(self._formats)].get(match[2], "")
