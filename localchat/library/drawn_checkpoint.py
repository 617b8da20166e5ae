"""A safetensors checkpoint drawn from a model's published shape: config.json and the tensors' sizes, as AWQ and
plain 16-bit repositories have them."""

from collections.abc import Iterator
from math import prod
from typing import Any, Final

from localchat.fit.checkpoint import Checkpoint
from localchat.fit.safetensors_header import SafetensorsHeader, Tensor
from localchat.library.blueprint import Blueprint
from localchat.library.catalogue import Entry

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
"""What GGUF calls llama, too."""
_GROUP: Final = 128
_FORMS: Final = {"AWQ": ("float16", "F16"), "BF16": ("bfloat16", "BF16"), "F16": ("float16", "F16")}
"""By quantization: the type of what is not quantized, as config.json and as a header has it."""


def drawn_checkpoint(entry: Entry, shape: Blueprint, quantization: str) -> Checkpoint | None:
    """The checkpoint that a repository of this model would hold, as far as memory goes; None for a
    quantization, or a layer's form, that is not known here."""
    form = _FORMS.get(quantization.upper())
    if form is None or shape.architecture not in _CLASSES:
        return None
    kind, stored = form
    awq = quantization.upper() == "AWQ"
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
        "torch_dtype": kind,
    }
    if awq:
        config["quantization_config"] = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": _GROUP,
            "version": "gemm",
            "zero_point": True,
        }
    tensors = tuple(_tensors(shape, stored, awq=awq))
    name = f"{entry.name}-{quantization.lower()}"
    whole = sum(tensor.size_bytes for tensor in tensors)
    return Checkpoint(name, config, (SafetensorsHeader(name, {}, tensors, whole),))


def _class(entry: Entry, shape: Blueprint) -> str:
    mistral = shape.architecture == "llama" and entry.family.startswith("mistral")
    return _MISTRAL if mistral else _CLASSES[shape.architecture]


def _tensors(shape: Blueprint, stored: str, *, awq: bool) -> Iterator[Tensor]:
    width, feed = shape.embedding, shape.feed
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
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
            yield from _product(f"{at}self_attn.{name}_proj", sides, stored, awq=awq)
        for expert in range(max(shape.experts, 1)):
            part = f"mlp.experts.{expert}." if shape.experts else "mlp."
            for name, sides in forward.items():
                yield from _product(f"{at}{part}{name}_proj", sides, stored, awq=awq)


def _product(name: str, sides: tuple[int, int], stored: str, *, awq: bool) -> Iterator[Tensor]:
    """A matrix from `sides[0]` to `sides[1]` columns."""
    columns, rows = sides
    if not awq:
        yield _tensor(f"{name}.weight", (rows, columns), stored)
        return
    yield _tensor(f"{name}.qweight", (columns, rows // 8), "I32")
    yield _tensor(f"{name}.qzeros", (columns // _GROUP, rows // 8), "I32")
    yield _tensor(f"{name}.scales", (columns // _GROUP, rows), stored)


def _tensor(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(name, shape, dtype, 0, prod(shape) * (4 if dtype == "I32" else 2))
