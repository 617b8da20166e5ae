"""Describes a safetensors checkpoint, from its settings and the headers of its weights."""

import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from localchat.errors import ModelInvalid, reason
from localchat.model_files.checkpoint import Checkpoint
from localchat.model_files.safetensors import Tensor
from localchat.models.info.gguf_info import ModelDescription, abilities_of, sentences_of

_JINJA: Final = "chat_template.jinja"
_MORE_TEMPLATES: Final = "additional_chat_templates"
_TEMPLATE_SETTINGS: Final = ("tokenizer_config.json", "chat_template.json")
_MAX_TEXT_BYTES: Final = 64 << 20
"""Limit on a tokenizer file. The largest vocabularies take a third of it."""
_MIDDLE_TOKENS: Final = ("<|fim_middle|>", "<fim_middle>", "<MID>")
"""Fill-in-the-middle tokens that the CUDA backend knows."""
_PACKED: Final = (".qweight", ".weight_packed")
_COMPANIONS: Final = (
    *(".qzeros", ".scales", "_scale", "_scale_inv", "_zero_point", ".weight_shape", "g_idx"),
    *("_scale_2", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),
)
"""Tensors that accompany quantized weights but contain no weights."""
_LICENCE: Final = re.compile(r"^license(?:_name)?:[ \t]*['\"]?([\w .+-]{1,80}?)['\"]?[ \t]*$", re.M)
_HALF: Final = 2
_FULL_ATTENTION_INTERVAL: Final = 4
"""Interval of Qwen3-Next and Qwen3.5, if their config omits it."""
_STATE_KINDS: Final = ("linear_attention", "mamba", "conv", "M")
_FEED_KINDS: Final = ("mlp", "moe", "-", "E")
"""Layers without keys: with a running state, or with a feed-forward part alone."""


def describe_checkpoint(
    folder: Path, model: Checkpoint, *, vocabulary: bool = False
) -> ModelDescription:
    """Describe a checkpoint. Raises ModelInvalid for settings that cannot be read.

    vocabulary: also search the tokenizer, to know whether the model fills in the middle.
    """
    templates = checkpoint_templates(folder)
    abilities = abilities_of(templates, infill=vocabulary and _fills_in(folder))
    can, cannot = sentences_of(abilities, templates)
    kinds = _layer_kinds(model)
    with_states = sum(kind in _STATE_KINDS for kind in kinds)
    with_keys = sum(kind not in (*_STATE_KINDS, *_FEED_KINDS) for kind in kinds)
    return ModelDescription(
        architecture=model.architecture,
        parameters=sum(_numbers(tensor, _bits(model)) for tensor in _tensors(model)),
        quantization=model.quantization,
        context_tokens=model.context_train,
        layers=model.number("num_hidden_layers") or len(kinds),
        vocab_size=model.number("vocab_size") or _rows(model, "embed_tokens.weight"),
        license=_license(folder),
        templates=templates,
        kv_bytes_per_token=2 * _HALF * with_keys * _key_width(model),
        kv_types=(),
        state_bytes=with_states * _state_bytes(model),
        abilities=abilities,
        can=can,
        cannot=cannot,
    )


def checkpoint_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates by name, `default` first. Raises ModelInvalid."""
    templates = dict(_templates(folder))
    default = {"default": templates.pop("default")} if "default" in templates else {}
    return default | dict(sorted(templates.items()))


def _templates(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield templates by name. A later one replaces an earlier one: template files override settings."""
    for name in reversed(_TEMPLATE_SETTINGS):
        stated = _settings(folder / name).get("chat_template")
        if isinstance(stated, str) and stated.strip():
            yield "default", stated
        if isinstance(stated, list):
            yield from _listed_templates(stated)
    for path in sorted((folder / _MORE_TEMPLATES).glob("*.jinja")):
        yield path.stem, _text(path)
    if (folder / _JINJA).is_file():
        yield "default", _text(folder / _JINJA)


def _listed_templates(entries: list[object]) -> Iterator[tuple[str, str]]:
    """Yield the named templates of a list in the settings."""
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            yield str(entry.get("name")), entry["template"]


def _settings(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(_text(path))
    except (ValueError, RecursionError) as problem:
        raise ModelInvalid(f"{path} is not JSON: {problem}.", path=str(path)) from problem
    if isinstance(settings, dict):
        return settings
    return {}


def _text(path: Path) -> str:
    """Read a text file, up to a limit. Raises ModelInvalid."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_TEXT_BYTES).decode("utf-8", "replace")
    except OSError as problem:
        raise ModelInvalid(
            f"{path} cannot be read: {reason(problem)}.", path=str(path)
        ) from problem


def _fills_in(folder: Path) -> bool:
    path = folder / "tokenizer.json"
    text = ""
    if path.is_file():
        text = _text(path)
    return any(json.dumps(token) in text for token in _MIDDLE_TOKENS)


def _license(folder: Path) -> str:
    """Return the license in the head of the model card. Empty without one."""
    card = folder / "README.md"
    head = ""
    if card.is_file():
        head = _text(card)[:4096]
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


def _layer_kinds(model: Checkpoint) -> list[str]:
    """Return the kind of each layer by its name in the config."""
    text = model.config.get("text_config")
    config = {**model.config, **(text if isinstance(text, Mapping) else {})}
    for field in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        kinds = config.get(field)
        if isinstance(kinds, list | str):
            return [str(kind) for kind in kinds]
    layers = model.number("num_hidden_layers")
    attention = config.get("full_attn_idxs")
    if isinstance(attention, list):
        return ["attention" if layer in attention else "conv" for layer in range(layers)]
    interval = layers + 1
    if model.number("linear_num_value_heads"):
        interval = model.number("full_attention_interval") or _FULL_ATTENTION_INTERVAL
    kinds = ("attention", "linear_attention")
    return [kinds[interval <= layers and (layer + 1) % interval != 0] for layer in range(layers)]


def _state_bytes(model: Checkpoint) -> int:
    """Return the bytes of a state in one layer: fp32 matrices, and the convolution's 16-bit inputs."""

    def number(*names: str) -> int:
        return next((value for value in map(model.number, names) if value), 0)

    if taps := number("conv_L_cache"):
        return (taps - 1) * _HALF * number("hidden_size")
    heads = number("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads")
    groups = number("linear_num_key_heads", "mamba_n_groups", "n_groups")
    key = number("linear_key_head_dim", "mamba_d_state", "ssm_state_size")
    value = number("linear_value_head_dim", "mamba_d_head", "mamba_head_dim")
    if heads and not value:
        value = number("mamba_expand") * number("hidden_size") // heads
    return 4 * heads * key * value + 3 * _HALF * (2 * groups * key + heads * value)


def _key_width(model: Checkpoint) -> int:
    """Return the numbers of one token's keys in a layer. 0 if nothing states it."""
    heads = model.number("num_key_value_heads") or model.number("num_attention_heads")
    attention = model.number("num_attention_heads")
    head = model.number("head_dim")
    if not head and attention:
        head = model.number("hidden_size") // attention
    return heads * head or _rows(model, "self_attn.k_proj.weight")


def _rows(model: Checkpoint, name: str) -> int:
    tensors = (tensor for tensor in _tensors(model) if tensor.name.endswith(name))
    return next((tensor.shape[0] for tensor in tensors if len(tensor.shape) == 2), 0)
