"""Describes a safetensors checkpoint, from its settings and the headers of its weights."""

import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Final

from localchat.model_files.chat_templates import chat_templates, read_text
from localchat.model_files.checkpoint import Checkpoint
from localchat.model_files.safetensors import Tensor
from localchat.models.info.gguf_info import ModelDescription, abilities_of, sentences_of

_MIDDLE_TOKENS: Final = ("<|fim_middle|>", "<fim_middle>", "<MID>")
"""Fill-in-the-middle tokens that the CUDA backend knows."""
_PACKED: Final = (".qweight", ".weight_packed")
_COMPANIONS: Final = (
    *(".qzeros", ".scales", "_scale", "_scale_inv", "_zero_point", ".weight_shape", "g_idx"),
    *("_scale_2", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),
)
"""Tensors that accompany quantized weights but contain no weights."""
_LICENCE: Final = re.compile(r"^license(?:_name)?:[ \t]*['\"]?([\w .+-]{1,80}?)['\"]?[ \t]*$", re.M)


def describe_checkpoint(
    folder: Path, model: Checkpoint, *, vocabulary: bool = False
) -> ModelDescription:
    """Describe a checkpoint. Raises ModelInvalid for settings that cannot be read.

    vocabulary: also search the tokenizer, to know whether the model fills in the middle.
    """
    templates = chat_templates(folder)
    abilities = abilities_of(templates, infill=vocabulary and _fills_in(folder))
    can, cannot = sentences_of(abilities, templates)
    return ModelDescription(
        architecture=model.architecture,
        parameters=sum(_numbers(tensor, _bits(model)) for tensor in _tensors(model)),
        quantization=model.quantization,
        context_tokens=model.context_train,
        layers=model.number("num_hidden_layers"),
        vocab_size=model.number("vocab_size") or _rows(model, "embed_tokens.weight"),
        license=_license(folder),
        templates=templates,
        abilities=abilities,
        can=can,
        cannot=cannot,
    )


def _fills_in(folder: Path) -> bool:
    path = folder / "tokenizer.json"
    text = ""
    if path.is_file():
        text = read_text(path, "replace")
    return any(json.dumps(token) in text for token in _MIDDLE_TOKENS)


def _license(folder: Path) -> str:
    """Return the license in the head of the model card. Empty without one."""
    card = folder / "README.md"
    head = ""
    if card.is_file():
        head = read_text(card, "replace")[:4096]
    if not head.startswith("---"):
        return ""
    match = _LICENCE.search(head.partition("\n---")[0])
    if match:
        return match[1].strip()
    return ""


def _tensors(model: Checkpoint) -> Iterator[Tensor]:
    return (tensor for header in model.headers for tensor in header.tensors)


def _numbers(tensor: Tensor, bits: int) -> int:
    """Count the weights of a tensor. Packed tensors store several in an integer."""
    if tensor.name.endswith(_COMPANIONS):
        return 0
    if tensor.name.endswith(_PACKED):
        return tensor.size_bytes * 8 // bits
    return prod(tensor.shape)


def _bits(model: Checkpoint) -> int:
    """Return the bits of a packed weight. 4 if the config omits it."""
    stated = model.config.get("quantization_config")
    config = stated if isinstance(stated, Mapping) else {}
    groups = config.get("config_groups")
    weights = [
        group.get("weights")
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping)
    ]
    named = [
        config.get("bits"),
        *(item.get("num_bits") for item in weights if isinstance(item, dict)),
    ]
    return next((item for item in named if isinstance(item, int) and 1 <= item <= 16), 4)


def _rows(model: Checkpoint, name: str) -> int:
    tensors = (tensor for tensor in _tensors(model) if tensor.name.endswith(name))
    return next((tensor.shape[0] for tensor in tensors if len(tensor.shape) == 2), 0)
