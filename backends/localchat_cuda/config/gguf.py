"""Translates the header of a GGUF file to that of a Hugging Face checkpoint. Imports no torch."""

import re
import struct
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from localchat.errors import ModelInvalid, reason
from localchat.model_files.gguf import GgufTensor, Header
from localchat.model_files.pre_tokenizers import PATTERNS
from localchat.model_files.safetensors import SafetensorsHeader, Tensor
from localchat_cuda.architectures import families
from localchat_cuda.architectures.family import Family, GgufTraits
from localchat_cuda.config.gguf_hybrid import feed_columns, hybrid_config, key_heads
from localchat_cuda.ggml_forms import GGUF_FORMS, packed_bytes

TOKENIZER_KINDS: Final = (*PATTERNS, "sentencepiece")
"""Supported kinds of tokenizers: byte-level BPE by its `tokenizer.ggml.pre`, and SentencePiece, for which
`tokenizer.ggml.model` is llama."""
_FLOATING: Final = ("F32", "F16", "BF16")
_ROPE_FACTORS: Final = "rope_freqs.weight"
_LLAMA_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
CHECKPOINT_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
LayerFormats: TypeAlias = tuple[tuple[tuple[str, str], ...], ...]
"""Pairs of a linear layer's name and its number format, for each kind of layer."""


def checkpoint_names(header: Header) -> dict[str, GgufTensor]:
    """Return the tensors by their names in a checkpoint. Unknown tensors keep their names."""
    names = {**_LLAMA_NAMES, **gguf_traits(header).names}
    return {
        _checkpoint_name(tensor.name, names): tensor
        for tensor in header.tensors
        if tensor.name != _ROPE_FACTORS
    }


def _checkpoint_name(name: str, names: Mapping[str, str]) -> str:
    prefix = ""
    own_name = name
    match = _LAYER.fullmatch(name)
    if match is not None:
        prefix = f"model.layers.{match[1]}."
        own_name = match[2]
    if own_name in names:
        return prefix + names[own_name]
    stem, _, suffix = own_name.rpartition(".")
    if stem not in names:
        return name
    return f"{prefix}{names[stem]}.{suffix}"


def _family(header: Header) -> Family | None:
    """Return the family of a file; None if its files are not supported."""
    for family in families():
        traits = family.gguf
        if traits is not None and (traits.architecture or family.name) == header.architecture:
            return family
    return None


def gguf_traits(header: Header) -> GgufTraits:
    """Return how the tensors of a file differ from those of a Llama."""
    family = _family(header)
    if family is None or family.gguf is None:
        return GgufTraits()
    return family.gguf


def norm_offset(header: Header) -> float:
    """Return what llama.cpp's converter added to the weights of norms."""
    family = _family(header)
    return 0.0 if family is None else family.names.norm_offset


def layer_formats(header: Header) -> LayerFormats:
    """Return the number formats of the matrices of each kind of layer in the file."""
    layers: dict[str, dict[str, str]] = {}
    for name, tensor in checkpoint_names(header).items():
        match = CHECKPOINT_LAYER.fullmatch(name)
        if match is not None and len(tensor.shape) == 2:
            layers.setdefault(match[1], {})[match[2]] = tensor.format.name
    return tuple(dict.fromkeys(tuple(sorted(formats.items())) for formats in layers.values()))


def rotated_heads(header: Header) -> dict[str, int]:
    """Return the heads of projections whose rows llama.cpp's converter reordered, by name."""
    if not gguf_traits(header).paired_rows:
        return {}
    heads = header.number("attention.head_count")
    return {"q_proj": heads, "k_proj": key_heads(header)}


def config_of(header: Header, rope_factors: tuple[float, ...] = ()) -> dict[str, Any]:
    """Return the contents of config.json. `rope_factors`: of rope_freqs.weight. Raises ModelInvalid."""
    family = _family(header)
    if family is None:
        raise _unsupported(header, f"the architecture {header.architecture}")
    if header.number("expert_count"):
        raise _unsupported(header, "a mixture of experts")
    unsupported = {tensor.format.name for tensor in header.tensors} - {*GGUF_FORMS, *_FLOATING}
    if unsupported:
        raise _unsupported(header, f"weights in {', '.join(sorted(unsupported))}")
    heads = header.number("attention.head_count")
    if heads < 1:
        raise _unsupported(header, "layers without a common number of query heads")
    formats = {tensor.name: tensor.format.name for tensor in header.tensors}
    head = formats.get("output.weight") or formats.get("token_embd.weight")
    eps = _float(header, "attention.layer_norm_rms_epsilon", 1e-5)
    # Activations of models with norms after each part, and of hybrids, may exceed the range of fp16.
    needs_range = family.post_normed or family.names.recurrent is not None
    config: dict[str, Any] = {
        "architectures": [family.classes[0]],
        "torch_dtype": "bfloat16" if needs_range else "float16",
        "hidden_size": header.number("embedding_length"),
        "intermediate_size": feed_columns(header),
        "num_hidden_layers": header.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads(header),
        "vocab_size": _rows(header, "token_embd.weight"),
        "max_position_embeddings": header.number("context_length"),
        "rms_norm_eps": eps,
        "rope_theta": _float(header, "rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in formats,
        "quantization_config": {"quant_method": "gguf", "mix": header.quantization, "head": head},
    }
    if head_dim := header.number("attention.key_length"):
        config["head_dim"] = head_dim
    config |= _attention_config(header, family)
    config |= hybrid_config(header, family, eps)
    if family.multipliers:
        config |= _granite_config(header)
    if scaling := _scaling(header, rope_factors):
        config["rope_scaling"] = scaling
    return config


def _attention_config(header: Header, family: Family) -> dict[str, Any]:
    """Return the fields of windows, scales, caps and partial rotation that the family reads."""
    traits = gguf_traits(header)
    head_width = header.number("embedding_length") // header.number("attention.head_count")
    config: dict[str, Any] = {}
    if any(tensor.name.startswith("rope_factors_") for tensor in header.tensors):
        raise _unsupported(header, "LongRoPE's factors")
    if traits.partial_rotation:
        rotary_columns = header.number("rope.dimension_count", head_width)
        config["partial_rotary_factor"] = rotary_columns / head_width
    # Without a window in the file, the default of the family applies.
    window = header.number("attention.sliding_window")
    if window and not family.window_switch:
        config["sliding_window"] = window
    if family.scale_field:
        # The file does not store the scale, so llama.cpp recognizes the largest model by its layers.
        is_largest = header.number("block_count") == traits.largest_layers
        width = head_width if is_largest else header.number("attention.key_length")
        config[family.scale_field] = width
    if family.attention_cap_field:
        config[family.attention_cap_field] = _float(header, "attn_logit_softcapping", 50.0)
        config[family.head_cap_field] = _float(header, "final_logit_softcapping", 30.0)
    if family.defaults.get("rope_local_base_freq"):
        config["rope_local_base_freq"] = _float(header, "rope.freq_base_swa", 10000.0)
    return config


def _granite_config(header: Header) -> dict[str, Any]:
    if header.metadata.get("granite.rope.scaling.finetuned") is False:
        raise _unsupported(header, "a Granite without rotations")
    width = header.number("attention.key_length") or (
        header.number("embedding_length") // header.number("attention.head_count")
    )
    return {
        "embedding_multiplier": _float(header, "embedding_scale", 1.0),
        "residual_multiplier": _float(header, "residual_scale", 1.0),
        "attention_multiplier": _float(header, "attention.scale", 0.0) or width**-0.5,
        "logits_scaling": _float(header, "logit_scale", 1.0),
    }


def _scaling(header: Header, factors: tuple[float, ...]) -> dict[str, Any]:
    context = header.number("context_length")
    if factors:
        # Llama 3.1's scaling, as a factor for each pair of columns.
        return {
            "rope_type": "longrope",
            "short_factor": list(factors),
            "long_factor": list(factors),
            "original_max_position_embeddings": max(context, 2),
            "attention_factor": 1.0,
        }
    kind = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {}
    return {
        "rope_type": kind,
        "factor": _float(header, "rope.scaling.factor", 1.0),
        "original_max_position_embeddings": header.number(
            "rope.scaling.original_context_length", context
        ),
    }


def tokenizer_kind(header: Header) -> str:
    """Return the kind of a file's tokenizer. Raises ModelInvalid for unsupported kinds."""
    model = header.metadata.get("tokenizer.ggml.model")
    pre = header.metadata.get("tokenizer.ggml.pre")
    if model == "llama" and pre in (None, "default"):
        return "sentencepiece"
    if model == "gpt2" and isinstance(pre, str) and pre in PATTERNS:
        return pre
    raise ModelInvalid(
        f"{header.name}: the CUDA backend cannot read its tokenizer ({model}, {pre or 'unnamed'}).",
        hint="Leave out --backend cuda: llama.cpp runs this file on the GPU too. The CUDA backend reads "
        f"tokenizers of the kinds {', '.join(TOKENIZER_KINDS)}.",
    )


def read_rope_factors(header: Header) -> tuple[float, ...]:
    """Read the factors that slow rotations; empty if the file has none. Raises ModelInvalid."""
    tensor = _tensor(header, _ROPE_FACTORS)
    if tensor is None or tensor.format.name != "F32":
        return ()
    try:
        with header.parts[tensor.part].open("rb") as file:
            file.seek(tensor.offset)
            return struct.unpack(f"<{tensor.elements}f", file.read(tensor.size_bytes))
    except (OSError, struct.error) as error:
        raise ModelInvalid(
            f"{header.name}: {_ROPE_FACTORS} cannot be read: {reason(error)}.",
            hint="The file may be damaged: download it again.",
        ) from error


def loaded_header(header: Header) -> SafetensorsHeader:
    """Return the tensors as they are in memory once loaded: layers and head repacked, others floating."""
    tensors = []
    for name, stored in checkpoint_names(header).items():
        shape = stored.shape[::-1]
        is_linear = ".layers." in name or name == "lm_head.weight"
        type_ = "F16"
        size = 2 * stored.elements
        if is_linear and stored.format.name in GGUF_FORMS and len(shape) == 2:
            type_ = stored.format.name
            size = packed_bytes(type_, *shape)
        tensors.append(Tensor(name, shape, type_, stored.offset, size))
    return SafetensorsHeader(header.name, {}, tuple(tensors), header.file_bytes)


def _rows(header: Header, name: str) -> int:
    tensor = _tensor(header, name)
    return header.vocab_size if tensor is None else tensor.shape[-1]


def _tensor(header: Header, name: str) -> GgufTensor | None:
    return next((tensor for tensor in header.tensors if tensor.name == name), None)


def _float(header: Header, key: str, default: float) -> float:
    number = header.metadata.get(f"{header.architecture}.{key}")
    if isinstance(number, int | float):
        return float(number)
    return default


def _unsupported(header: Header, what: str) -> ModelInvalid:
    supported = ", ".join(
        family.gguf.architecture or family.name for family in families() if family.gguf is not None
    )
    return ModelInvalid(
        f"{header.name}: the CUDA backend cannot run {what} from a GGUF file.",
        hint=f"Leave out --backend cuda: llama.cpp runs this file on the GPU too. The CUDA backend "
        f"runs GGUF files of the architectures {supported}, in {', '.join(GGUF_FORMS)} and floating formats.",
    )
