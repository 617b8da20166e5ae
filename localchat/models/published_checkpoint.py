"""Settings and tensor sizes of the catalogue's safetensors models, from their published shapes.

Covers the forms of the repositories: AWQ, GPTQ, FP8 and plain 16 bits.
"""

from collections.abc import Iterator
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
_MISTRAL: Final = "MistralForCausalLM"
"""GGUF calls this architecture llama, too."""
_GROUP: Final = 128


_BYTES: Final = {"F8_E4M3": 1, "F16": 2, "BF16": 2, "I32": 4}


class _Storage(NamedTuple):
    """Number formats of a checkpoint."""

    torch_dtype: str
    """Of everything that is not quantized, as config.json writes it."""
    dtype: str
    """The same, as a safetensors header writes it."""
    quantization_config: dict[str, Any] | None = None


_STORAGE: Final = {
    "BF16": _Storage("bfloat16", "BF16"),
    "F16": _Storage("float16", "F16"),
    "AWQ": _Storage(
        "float16",
        "F16",
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": _GROUP,
            "version": "gemm",
            "zero_point": True,
        },
    ),
    **{
        f"GPTQ-INT{bits}": _Storage(
            "float16",
            "F16",
            {
                "quant_method": "gptq",
                "bits": bits,
                "group_size": _GROUP,
                "sym": True,
                "desc_act": False,
            },
        )
        for bits in (4, 8)
    },
    "FP8": _Storage(
        "bfloat16",
        "BF16",
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_GROUP, _GROUP],
        },
    ),
}


def published_checkpoint(
    entry: CatalogEntry, shape: PublishedShape, quantization: str
) -> Checkpoint | None:
    """The checkpoint of this model as far as memory goes; None for a quantization or class not known here."""
    storage = _STORAGE.get(quantization.upper())
    if storage is None or shape.architecture not in _CLASSES:
        return None
    config: dict[str, Any] = {
        "architectures": [_class(entry, shape)],
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
    if storage.quantization_config is not None:
        config["quantization_config"] = storage.quantization_config
    tensors = tuple(_tensors(shape, storage))
    name = f"{entry.name}-{quantization.lower()}"
    whole = sum(tensor.size_bytes for tensor in tensors)
    return Checkpoint(name, config, (SafetensorsHeader(name, {}, tensors, whole),))


def _class(entry: CatalogEntry, shape: PublishedShape) -> str:
    mistral = shape.architecture == "llama" and entry.family.startswith("mistral")
    return _MISTRAL if mistral else _CLASSES[shape.architecture]


def _tensors(shape: PublishedShape, storage: _Storage) -> Iterator[Tensor]:
    width = shape.embedding
    feed = shape.feed
    stored = storage.dtype
    queries = shape.heads * shape.head
    keys = shape.kv_heads * shape.head
    yield _tensor("model.embed_tokens.weight", (shape.vocabulary, width), stored)
    yield _tensor("model.norm.weight", (width,), stored)
    if not shape.tied:
        yield _tensor("lm_head.weight", (shape.vocabulary, width), stored)
    attention = {
        "q": (width, queries),
        "k": (width, keys),
        "v": (width, keys),
        "o": (queries, width),
    }
    forward = {"gate": (width, feed), "up": (width, feed), "down": (feed, width)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        yield _tensor(f"{at}input_layernorm.weight", (width,), stored)
        yield _tensor(f"{at}post_attention_layernorm.weight", (width,), stored)
        for name, sides in attention.items():
            yield from _linear(f"{at}self_attn.{name}_proj", sides, storage)
        if shape.experts:
            yield _tensor(f"{at}mlp.gate.weight", (shape.experts, width), stored)
        for expert in range(max(shape.experts, 1)):
            part = f"mlp.experts.{expert}." if shape.experts else "mlp."
            for name, sides in forward.items():
                yield from _linear(f"{at}{part}{name}_proj", sides, storage)


def _linear(name: str, sides: tuple[int, int], storage: _Storage) -> Iterator[Tensor]:
    """The tensors of one linear layer; sides: its inputs and outputs."""
    columns, rows = sides
    groups = -(-columns // _GROUP)
    method = (storage.quantization_config or {}).get("quant_method")
    if method == "awq":
        yield _tensor(f"{name}.qweight", (columns, rows // 8), "I32")
        yield _tensor(f"{name}.qzeros", (groups, rows // 8), "I32")
        yield _tensor(f"{name}.scales", (groups, rows), storage.dtype)
    elif method == "gptq":
        bits = int((storage.quantization_config or {})["bits"])
        yield _tensor(f"{name}.qweight", (columns * bits // 32, rows), "I32")
        yield _tensor(f"{name}.qzeros", (groups, rows * bits // 32), "I32")
        yield _tensor(f"{name}.scales", (groups, rows), storage.dtype)
        yield _tensor(f"{name}.g_idx", (columns,), "I32")
    elif method == "fp8":
        yield _tensor(f"{name}.weight", (rows, columns), "F8_E4M3")
        yield _tensor(f"{name}.weight_scale_inv", (-(-rows // _GROUP), groups), storage.dtype)
    else:
        yield _tensor(f"{name}.weight", (rows, columns), storage.dtype)


def _tensor(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(name, shape, dtype, 0, prod(shape) * _BYTES[dtype])
