"""Names and layouts of tensors: transformers' on one side, llama.cpp's on the other."""

import re
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from localchat.errors import ModelInvalid
from localchat.model_files.open_gguf import MAX_LAYERS

_INTERLEAVED: Final = {
    **dict.fromkeys(("llama", "granite", "smollm3"), True),
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen3", "qwen3moe"), False),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "olmo2", "phi3"), False),
}
"""Architectures of llama.cpp whose names are known.

True: rotary embeddings turn neighboring numbers, so the rows of queries and keys have another order than in
transformers."""
_PARTS_OF_MODEL: Final = re.compile(r"(^|\.)(language_model|text_model)\.")
_SUFFIXES: Final = (".weight", ".bias")


def name_map(architecture: str, layers: int, subject: str) -> Callable[[str], str | None]:
    """Return a function that maps a name of transformers to llama.cpp's, None for an unknown one.

    subject: the file, for errors. Raises ModelInvalid for an unsupported architecture, and
    for too many layers.
    """
    if architecture not in _INTERLEAVED:
        raise ModelInvalid(
            f"{subject} cannot be converted for the architecture {architecture or 'without a name'}; "
            f"supported are {', '.join(_INTERLEAVED)}.",
            hint="Convert it with convert_hf_to_gguf.py or convert_lora_to_gguf.py of llama.cpp.",
        )
    if layers > MAX_LAYERS:
        raise ModelInvalid(f"{subject} has {layers:,} layers; llama.cpp runs {MAX_LAYERS} at most.")
    # Takes 0.1 s, which only conversions need.
    import gguf

    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(code, layers)

    def mapped(name: str) -> str | None:
        name = _PARTS_OF_MODEL.sub(r"\1", name)
        if name.startswith("model.model."):
            name = name.removeprefix("model.")
        target: str | None = table.get_name(name, try_suffixes=_SUFFIXES)
        return target

    return mapped


def reorders(name: str, architecture: str) -> bool:
    """Return whether the rows of a tensor have another order in llama.cpp. name: llama.cpp's."""
    return _INTERLEAVED[architecture] and (".attn_q." in name or ".attn_k." in name)


def reordered(rows: NDArray[np.generic], heads: int) -> NDArray[np.generic]:
    """Return the rows of queries or keys in llama.cpp's order. Copies them.

    transformers rotates number i of a head with number i + D/2; llama.cpp rotates neighbors.
    """
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
