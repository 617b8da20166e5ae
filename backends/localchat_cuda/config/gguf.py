"""Configuration and tensor names of a GGUF file, as a Hugging Face checkpoint states them. Imports no torch."""

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, get_args

from localchat.errors import ModelInvalid
from localchat.model_files.gguf import Array, GgufTensor, Header
from localchat.model_files.safetensors import SafetensorsHeader, Tensor
from localchat_cuda.ggml_forms import GGUF_FORMS, packed_bytes

TokenizerKind: TypeAlias = Literal[
    "qwen2",
    "llama-bpe",
    "dbrx",
    "smaug-bpe",
    "seed-coder",
    "gpt-2",
    "gpt-4o",
    "smollm",
    "refact",
    "tekken",
    "sentencepiece",
]
TOKENIZER_KINDS: Final[tuple[TokenizerKind, ...]] = get_args(TokenizerKind)
"""Kinds of tokenizers that the backend reads: byte-level ones by their `tokenizer.ggml.pre`, and those of
SentencePiece (`tokenizer.ggml.model` is llama)."""
_CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""By `general.architecture`."""
_GEMMAS: Final = ("gemma2", "gemma3")
_REORDERED: Final = ("llama", "granite", "smollm3")
"""llama.cpp turns neighbouring columns of their heads, so its converter moves rows of queries and keys."""
_LARGEST: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27Bs, whose scores alone are scaled by the width of the model over its heads."""
_FLOATING: Final = ("F32", "F16", "BF16")
_ROPE_FACTORS: Final = "rope_freqs.weight"
_NAMES: Final = {
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
_GEMMA_NAMES: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHER_NAMES: Final[dict[str, dict[str, str]]] = {
    **dict.fromkeys(_GEMMAS, _GEMMA_NAMES),
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
}
"""Where an architecture's names differ."""
_LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
_CHECKPOINT_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
LayerFormats: TypeAlias = tuple[tuple[tuple[str, str], ...], ...]
"""Of each kind of layer, pairs of a linear layer's name and its number format."""


def checkpoint_names(header: Header) -> dict[str, GgufTensor]:
    """Tensors by their names in a checkpoint; unknown ones keep theirs."""
    names = {**_NAMES, **_OTHER_NAMES.get(header.architecture, {})}
    return {
        _checkpoint_name(tensor.name, names): tensor
        for tensor in header.tensors
        if tensor.name != _ROPE_FACTORS
    }


def _checkpoint_name(name: str, names: Mapping[str, str]) -> str:
    found = _LAYER.fullmatch(name)
    begin, rest = (f"model.layers.{found[1]}.", found[2]) if found else ("", name)
    stem, _, end = rest.rpartition(".")
    return f"{begin}{names[stem]}.{end}" if stem in names else name


def added_to_norms(header: Header) -> int:
    """What llama.cpp's converter added to the weights of norms: a Gemma's count from 0."""
    return int(header.architecture in _GEMMAS)


def layer_formats(header: Header) -> LayerFormats:
    """Return the number formats of the matrices of each kind of layer in the file."""
    layers: dict[str, dict[str, str]] = {}
    for name, each in checkpoint_names(header).items():
        found = _CHECKPOINT_LAYER.fullmatch(name)
        if found and len(each.shape) == 2:
            layers.setdefault(found[1], {})[found[2]] = each.format.name
    return tuple(dict.fromkeys(tuple(sorted(each.items())) for each in layers.values()))


def rotated_heads(header: Header) -> dict[str, int]:
    """Heads of the projections whose rows llama.cpp's converter reordered, by name."""
    if header.architecture not in _REORDERED:
        return {}
    heads = header.number("attention.head_count")
    return {"q_proj": heads, "k_proj": header.number("attention.head_count_kv", heads)}


def config_of(header: Header, rope_factors: tuple[float, ...] = ()) -> dict[str, Any]:
    """The contents of config.json. `rope_factors`: of rope_freqs.weight. Raises ModelInvalid."""
    architecture = header.architecture
    if architecture not in _CLASSES:
        raise _unsupported(header, f"the architecture {architecture}")
    if header.number("expert_count"):
        raise _unsupported(header, "a mixture of experts")
    foreign = {each.format.name for each in header.tensors} - {*GGUF_FORMS, *_FLOATING}
    if foreign:
        raise _unsupported(header, f"weights in {', '.join(sorted(foreign))}")
    heads = header.number("attention.head_count")
    formats = {each.name: each.format.name for each in header.tensors}
    head = formats.get("output.weight") or formats.get("token_embd.weight")
    config: dict[str, Any] = {
        "architectures": [_CLASSES[architecture]],
        "torch_dtype": "float16",
        "hidden_size": header.number("embedding_length"),
        "intermediate_size": header.number("feed_forward_length"),
        "num_hidden_layers": header.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.number("attention.head_count_kv", heads),
        "vocab_size": _rows(header, "token_embd.weight"),
        "max_position_embeddings": header.number("context_length"),
        "rms_norm_eps": _float(header, "attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": _float(header, "rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in formats,
        "quantization_config": {"quant_method": "gguf", "mix": header.quantization, "head": head},
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if head_dim := header.number("attention.key_length"):
        config["head_dim"] = head_dim
    if architecture in _GEMMAS:
        config |= _gemma_config(header)
    elif architecture == "granite":
        config |= _granite_config(header)
    elif architecture == "phi3":
        config |= _phi3_config(header)
    if scaling := _scaling(header, rope_factors):
        config["rope_scaling"] = scaling
    return config


def _gemma_config(header: Header) -> dict[str, Any]:
    """What llama.cpp knows of a Gemma besides, from the metadata or by its architecture."""
    name = header.architecture
    heads = header.number("attention.head_count")
    width = header.number("attention.key_length")
    if header.number("block_count") == _LARGEST[name]:
        width = header.number("embedding_length") // heads
    second = name == "gemma2"
    return {
        # Their activations leave the range of fp16.
        "torch_dtype": "bfloat16",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "sliding_window": header.number("attention.sliding_window"),
        "sliding_window_pattern": 2 if second else 6,
        "rope_local_base_freq": _float(header, "rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": _float(header, "attn_logit_softcapping", 50.0)
        if second
        else None,
        "final_logit_softcapping": _float(header, "final_logit_softcapping", 30.0)
        if second
        else None,
    }


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


def _phi3_config(header: Header) -> dict[str, Any]:
    if any(each.name.startswith("rope_factors_") for each in header.tensors):
        raise _unsupported(header, "LongRoPE's factors")
    width = header.number("embedding_length") // header.number("attention.head_count")
    return {
        "partial_rotary_factor": header.number("rope.dimension_count", width) / width,
        "sliding_window": header.number("attention.sliding_window") or None,
    }


def _scaling(header: Header, factors: tuple[float, ...]) -> dict[str, Any]:
    context = header.number("context_length")
    if factors:
        # Llama 3.1's scaling, as one factor for each pair of columns
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


def tokenizer_kind(header: Header) -> TokenizerKind:
    """How the tokenizer of a file cuts texts. Raises ModelInvalid for kinds that the backend cannot read."""
    model = header.metadata.get("tokenizer.ggml.model")
    pre = header.metadata.get("tokenizer.ggml.pre")
    if model == "llama" and pre in (None, "default"):
        return "sentencepiece"
    if model == "gpt2" and pre != "sentencepiece":
        for kind in TOKENIZER_KINDS:
            if pre == kind:
                return kind
    raise ModelInvalid(
        f"{header.name}: the CUDA backend cannot read its tokenizer ({model}, {pre or 'of no name'}).",
        hint="Leave out --backend cuda: llama.cpp runs this file on the GPU too. The CUDA backend reads "
        f"tokenizers of the kinds {', '.join(TOKENIZER_KINDS)}.",
    )


def has_rope_factors(header: Header) -> GgufTensor | None:
    """The tensor of factors by which rotations are slowed; None: there is none."""
    return next((each for each in header.tensors if each.name == _ROPE_FACTORS), None)


def loaded_header(header: Header) -> SafetensorsHeader:
    """Return the tensors as they are in memory once loaded: layers and head repacked, the rest floating."""
    tensors = []
    for name, each in checkpoint_names(header).items():
        shape = each.shape[::-1]
        type_ = each.format.name
        repacked = ".layers." in name or name == "lm_head.weight"
        repacked = repacked and type_ in GGUF_FORMS and len(shape) == 2
        size = packed_bytes(type_, *shape) if repacked else 2 * each.elements
        tensors.append(Tensor(name, shape, type_ if repacked else "F16", each.offset, size))
    return SafetensorsHeader(header.name, {}, tuple(tensors), header.file_bytes)


def strings_of(header: Header, key: str) -> tuple[str, ...]:
    """An array of strings of the tokenizer's metadata that was kept; empty if there is none."""
    found = header.metadata.get(key)
    values: Mapping[int, Any] | tuple[Any, ...] = ()
    if isinstance(found, Array) and found.values is not None:
        values = found.values
    return tuple(str(each) for each in values)


def _rows(header: Header, name: str) -> int:
    found = next((each for each in header.tensors if each.name == name), None)
    if found is not None:
        return found.shape[-1]
    return header.vocab_size


def _float(header: Header, key: str, default: float) -> float:
    found = header.metadata.get(f"{header.architecture}.{key}")
    if isinstance(found, int | float):
        return float(found)
    return default


def _unsupported(header: Header, what: str) -> ModelInvalid:
    known = ", ".join(_CLASSES)
    return ModelInvalid(
        f"{header.name}: the CUDA backend cannot run {what} from a GGUF file.",
        hint=f"Leave out --backend cuda: llama.cpp runs this file on the GPU too. The CUDA backend "
        f"runs GGUF files of the architectures {known}, in {', '.join(GGUF_FORMS)} and floating formats.",
    )
