"""Checkpoints of the catalogue's models: config and tensors of safetensors files, without the files."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Final, NamedTuple

from localchat.model_files.checkpoint import Checkpoint
from localchat.model_files.safetensors import SafetensorsHeader, Tensor
from localchat.models.catalog import CatalogEntry
from localchat.models.published_shapes import PublishedShape

_CLASSES: Final = {
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_GROUP: Final = 128
"""Weights that share a scale in AWQ, GPTQ and FP8 files."""
_NUMBER_BYTES: Final = {"F8_E4M3": 1, "F16": 2, "BF16": 2, "I32": 4}
_AWQ: Final = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": _GROUP,
    "version": "gemm",
    "zero_point": True,
}
_FP8: Final = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [_GROUP, _GROUP],
}


def _gptq(bits: int) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": _GROUP,
        "sym": True,
        "desc_act": False,
    }


class _Storage(NamedTuple):
    """Number formats of a checkpoint."""

    torch_dtype: str
    """Type of everything that is not quantized, as config.json writes it."""
    dtype: str
    """Type of everything that is not quantized, as a safetensors header writes it."""
    quantization_config: Mapping[str, Any] = {}


_STORAGE: Final = {
    "BF16": _Storage("bfloat16", "BF16"),
    "F16": _Storage("float16", "F16"),
    "AWQ": _Storage("float16", "F16", _AWQ),
    "GPTQ-INT4": _Storage("float16", "F16", _gptq(4)),
    "GPTQ-INT8": _Storage("float16", "F16", _gptq(8)),
    "FP8": _Storage("bfloat16", "BF16", _FP8),
}


def published_checkpoint(
    entry: CatalogEntry, shape: PublishedShape, quantization: str
) -> Checkpoint | None:
    """Return the config and tensors of a checkpoint. None for an unknown quantization or architecture."""
    storage = _STORAGE.get(quantization.upper())
    if storage is None or shape.architecture not in _CLASSES:
        return None
    model_class = _CLASSES[shape.architecture]
    # GGUF calls the architecture of Mistral llama, too.
    if shape.architecture == "llama" and entry.family.startswith("mistral"):
        model_class = "MistralForCausalLM"
    config: dict[str, Any] = {
        "architectures": [model_class],
        "hidden_size": shape.embedding,
        "intermediate_size": shape.feed,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": entry.context_tokens,
        "tie_word_embeddings": shape.tied,
        "sliding_window": shape.window or None,
        "torch_dtype": storage.torch_dtype,
    }
    if shape.experts:
        config |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.experts_used,
            "moe_intermediate_size": shape.feed,
        }
    if storage.quantization_config:
        config["quantization_config"] = dict(storage.quantization_config)
    tensors = tuple(_checkpoint_tensors(shape, storage))
    name = f"{entry.name}-{quantization.lower()}"
    total_bytes = sum(tensor.size_bytes for tensor in tensors)
    return Checkpoint(name, config, (SafetensorsHeader(name, {}, tensors, total_bytes),))


def _checkpoint_tensors(shape: PublishedShape, storage: _Storage) -> Iterator[Tensor]:
    width = shape.embedding
    feed = shape.feed
    dtype = storage.dtype
    queries = shape.heads * shape.head
    keys = shape.kv_heads * shape.head
    yield _tensor("model.embed_tokens.weight", (shape.vocabulary, width), dtype)
    yield _tensor("model.norm.weight", (width,), dtype)
    if not shape.tied:
        yield _tensor("lm_head.weight", (shape.vocabulary, width), dtype)
    attention = {
        "q": (width, queries),
        "k": (width, keys),
        "v": (width, keys),
        "o": (queries, width),
    }
    feed_forward = {"gate": (width, feed), "up": (width, feed), "down": (feed, width)}
    experts = [f"experts.{expert}." for expert in range(shape.experts)]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield _tensor(f"{prefix}input_layernorm.weight", (width,), dtype)
        yield _tensor(f"{prefix}post_attention_layernorm.weight", (width,), dtype)
        for name, sides in attention.items():
            yield from _linear(f"{prefix}self_attn.{name}_proj", sides, storage)
        if experts:
            yield _tensor(f"{prefix}mlp.gate.weight", (shape.experts, width), dtype)
        for expert in experts or [""]:
            for name, sides in feed_forward.items():
                yield from _linear(f"{prefix}mlp.{expert}{name}_proj", sides, storage)


def _linear(name: str, sides: tuple[int, int], storage: _Storage) -> Iterator[Tensor]:
    """Yield the tensors of one linear layer. sides: inputs and outputs."""
    columns, rows = sides
    groups = -(-columns // _GROUP)
    match storage.quantization_config.get("quant_method"):
        case "awq":
            yield _tensor(f"{name}.qweight", (columns, rows // 8), "I32")
            yield _tensor(f"{name}.qzeros", (groups, rows // 8), "I32")
            yield _tensor(f"{name}.scales", (groups, rows), storage.dtype)
        case "gptq":
            bits = int(storage.quantization_config["bits"])
            yield _tensor(f"{name}.qweight", (columns * bits // 32, rows), "I32")
            yield _tensor(f"{name}.qzeros", (groups, rows * bits // 32), "I32")
            yield _tensor(f"{name}.scales", (groups, rows), storage.dtype)
            yield _tensor(f"{name}.g_idx", (columns,), "I32")
        case "fp8":
            yield _tensor(f"{name}.weight", (rows, columns), "F8_E4M3")
            yield _tensor(f"{name}.weight_scale_inv", (-(-rows // _GROUP), groups), storage.dtype)
        case _:
            yield _tensor(f"{name}.weight", (rows, columns), storage.dtype)


def _tensor(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(name, shape, dtype, 0, prod(shape) * _NUMBER_BYTES[dtype])
