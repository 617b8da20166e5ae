"""What config.json of a Hugging Face checkpoint says, checked once: the shapes that the engine runs on.

Imports no torch. What cannot be run is refused with what can, and with the way through llama.cpp.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

from localchat.errors import ModelInvalid, ModelMissing
from localchat_cuda.quantization import Quantization, parse_quantization

Architecture = Literal["llama", "qwen2", "qwen3"]
FloatType = Literal["bfloat16", "float16", "float32"]

CLASSES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Names in `architectures` of config.json."""
HEAD_DIMENSIONS = (64, 96, 128, 256)
_LOADS = "The CUDA backend loads Llama 3.x, Qwen2, Qwen2.5 and Qwen3 in bf16, fp16, fp32 or AWQ."
_OTHERWISE = f"{_LOADS} For other models take a GGUF file: llama.cpp runs it on this GPU too."


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretching of slow rotations, as rope_scaling of type llama3 has it."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. Numbers are per model: `hidden`, `feed` and `vocabulary` columns,
    `heads` of queries and `key_heads` of keys and values, each of `head_dim`.

    tied: the head is the embedding. quantization: of the layers, None: they are floating.
    ends: tokens that end a generation, as far as config.json knows.
    """

    architecture: Architecture
    layers: int
    hidden: int
    feed: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    context_train: int
    eps: float
    theta: float
    scaling: RopeScaling | None
    tied: bool
    biased: bool
    quantization: Quantization | None
    dtype: FloatType
    ends: tuple[int, ...] = ()

    @property
    def packed(self) -> bool:
        """Whether layers become 4-bit codes in the order of the W4 products."""
        return self.quantization is not None and self.quantization.packed

    @property
    def qkv_columns(self) -> int:
        """Columns of the merged product of queries, keys and values."""
        return (self.heads + 2 * self.key_heads) * self.head_dim

    @property
    def normed_heads(self) -> bool:
        """Whether queries and keys are normalized per head."""
        return self.architecture == "qwen3"


def read_config(folder: Path) -> ModelConfig:
    """The config of a checkpoint folder. Raises ModelMissing, ModelInvalid."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as trouble:
        raise ModelMissing(
            f"{folder} has no config.json.", hint="Give the folder of a Hugging Face checkpoint."
        ) from trouble
    except (OSError, ValueError, RecursionError) as trouble:
        raise ModelInvalid(f"{path} cannot be read: {trouble}.") from trouble
    if not isinstance(found, dict):
        raise ModelInvalid(f"{path} is no JSON object.")
    return parse_config(found, str(path))


def parse_config(raw: Mapping[str, Any], name: str) -> ModelConfig:
    """The config in parsed JSON; `name` for messages. Raises ModelInvalid."""
    reader = _Reader(raw, name)
    architecture = reader.architecture()
    heads, hidden = reader.whole("num_attention_heads"), reader.whole("hidden_size")
    key_heads = reader.whole("num_key_value_heads", heads)
    head_dim = reader.whole("head_dim", hidden // heads)
    if heads % key_heads:
        raise reader.refused(f"{heads} query heads are no multiple of {key_heads} key heads")
    if head_dim not in HEAD_DIMENSIONS:
        known = ", ".join(map(str, HEAD_DIMENSIONS))
        raise reader.refused(f"heads of {head_dim} columns ({known} are possible)")
    if raw.get("use_sliding_window"):
        raise reader.refused("attention with a sliding window")
    if raw.get("hidden_act", "silu") != "silu":
        raise reader.refused(f"the activation {raw['hidden_act']}")
    if raw.get("mlp_bias"):
        raise reader.refused("biases in the feed-forward layers")
    if architecture != "qwen2" and raw.get("attention_bias"):
        raise reader.refused("biases in the attention layers of this architecture")
    theta, scaling = reader.rotation()
    return ModelConfig(
        architecture=architecture,
        layers=reader.whole("num_hidden_layers"),
        hidden=hidden,
        feed=reader.whole("intermediate_size"),
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        vocabulary=reader.whole("vocab_size"),
        context_train=reader.whole("max_position_embeddings"),
        eps=reader.real("rms_norm_eps", 1e-6),
        theta=theta,
        scaling=scaling,
        tied=bool(raw.get("tie_word_embeddings", False)),
        biased=architecture == "qwen2",
        quantization=parse_quantization(raw.get("quantization_config"), name, reader.refused),
        dtype=reader.dtype(),
        ends=token_ids(raw.get("eos_token_id")),
    )


def token_ids(found: object) -> tuple[int, ...]:
    """`eos_token_id` in its three spellings: nothing, a number, a list of numbers."""
    listed = found if isinstance(found, list) else [found]
    return tuple(token for token in listed if isinstance(token, int) and token >= 0)


class _Reader:
    """Fields of one config.json, each refused by name."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        self.raw, self.name = raw, name

    def refused(self, what: str) -> ModelInvalid:
        return ModelInvalid(f"{self.name} asks for {what}.", hint=_OTHERWISE, path=self.name)

    def architecture(self) -> Architecture:
        named = self.raw.get("architectures")
        listed = [str(each) for each in named] if isinstance(named, list) else []
        for each in listed:
            if each in CLASSES:
                return CLASSES[each]
        raise self.refused(f"the architecture {', '.join(listed) or 'of no name'}")

    def whole(self, field: str, usual: int | None = None) -> int:
        found = self.raw.get(field)
        found = usual if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < 1 << 30:
            raise ModelInvalid(f"{self.name}: {field} is {found!r}, no usable number.")
        return found

    def real(self, field: str, usual: float, among: Mapping[str, Any] | None = None) -> float:
        found = (self.raw if among is None else among).get(field, usual)
        if not isinstance(found, int | float) or not 0 < found < 1e30:
            raise ModelInvalid(f"{self.name}: {field} is {found!r}, no usable number.")
        return float(found)

    def rotation(self) -> tuple[float, RopeScaling | None]:
        """Base and scaling. transformers 5 writes both into rope_parameters, 4 into two fields."""
        found = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not isinstance(found, dict):
            raise ModelInvalid(f"{self.name}: rope_scaling is {found!r}, no object.")
        theta = self.real("rope_theta", self.real("rope_theta", 10000.0), found)
        kind = found.get("rope_type") or found.get("type") or "default"
        if kind == "default":
            return theta, None
        if kind != "llama3":
            raise self.refused(f"rotary positions of type {kind}")
        return theta, RopeScaling(
            self.real("factor", 8.0, found),
            self.real("low_freq_factor", 1.0, found),
            self.real("high_freq_factor", 4.0, found),
            int(self.real("original_max_position_embeddings", 8192, found)),
        )

    def dtype(self) -> FloatType:
        found = self.raw.get("dtype") or self.raw.get("torch_dtype") or "float16"
        if not _is_float_type(found):
            raise self.refused(f"weights in {found}")
        return found


def _is_float_type(found: object) -> TypeGuard[FloatType]:
    return found in get_args(FloatType)
