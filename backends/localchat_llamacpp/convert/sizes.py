"""Converts config.json of a checkpoint to the sizes in a GGUF file.

It refuses what llama.cpp would ignore.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localchat.errors import ModelInvalid
from localchat.model_files.gguf import SAMPLING_KEYS
from localchat_llamacpp.convert.tensor_files import unsupported


class ConvertedFamily(NamedTuple):
    """A class of transformers that converts to an architecture of llama.cpp."""

    architecture: str
    activation: str = "silu"
    norm_shift: float = 0.0
    """Number that the class adds to the weights of its norms."""
    defaults: Mapping[str, Any] = {}
    """Fields that config.json may omit."""


_GEMMA3: Final = ConvertedFamily(
    "gemma3",
    "gelu_pytorch_tanh",
    1.0,
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
)
FAMILIES: Final[Mapping[str, ConvertedFamily]] = {
    "LlamaForCausalLM": ConvertedFamily("llama"),
    "MistralForCausalLM": ConvertedFamily("llama"),
    "Qwen2ForCausalLM": ConvertedFamily("qwen2"),
    "Qwen3ForCausalLM": ConvertedFamily("qwen3", defaults={"head_dim": 128}),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}
_SIZES: Final = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "vocab_size": "vocab_size",
}
_GEMMA_27B_LAYERS: Final = 62
"""Layers of the largest Gemma 3, whose queries llama.cpp scales by the model's width."""
_GEMMA_PATTERN: Final = 6
_LOCAL_BASE: Final = 10_000.0
Numbers = dict[str, int | float | str]


class CheckpointConfig:
    """Text part of a config.json."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        """name: the folder, for errors. Raises ModelInvalid for an unsupported class or quantization."""
        self._name = name
        classes = config.get("architectures") or ["without a class"]
        self._class = str(classes[0])
        if self._class not in FAMILIES:
            raise self._unsupported(
                f"its class is {self._class}, and supported are {', '.join(FAMILIES)}"
            )
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise self._unsupported(
                f"its weights are quantized ({method}); use the original checkpoint"
            )
        self.family = FAMILIES[self._class]
        text = config.get("text_config") or {}
        self._fields = {**self.family.defaults, **config, **text}

    @property
    def heads(self) -> int:
        """Heads of the queries."""
        return self._whole("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Heads of the keys and values."""
        return self._whole("num_key_value_heads", self.heads)

    @property
    def tied(self) -> bool:
        """Whether the output has the weights of the token embedding."""
        return bool(self._fields.get("tie_word_embeddings"))

    @property
    def _head_width(self) -> int:
        return self._whole("head_dim", self._whole("hidden_size") // self.heads)

    def numbers(self) -> Numbers:
        """Return the keys of the architecture, without its name. Raises ModelInvalid."""
        self._refuse_unknown()
        numbers: Numbers = {key: self._whole(field) for field, key in _SIZES.items()}
        numbers |= {
            "attention.head_count_kv": self.kv_heads,
            "attention.layer_norm_rms_epsilon": self._real("rms_norm_eps", 1e-6),
            "attention.key_length": self._head_width,
            "attention.value_length": self._head_width,
            "rope.dimension_count": self._head_width,
            "rope.freq_base": self._rope_base(),
            **self._rope_scaling(),
        }
        if self.family.architecture == "gemma3":
            numbers |= self._gemma_numbers()
        return numbers

    def rope_factors(self) -> NDArray[np.float32] | None:
        """Return the divisors of the rotations' frequencies that Llama 3.1 introduced, None for others."""
        rope = self._rope()
        if rope.get("rope_type") != "llama3":
            return None
        try:
            factor, low, high, context = (
                float(rope[key])
                for key in (
                    *("factor", "low_freq_factor", "high_freq_factor"),
                    "original_max_position_embeddings",
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._unsupported(f"its rope scaling is incomplete: {rope}") from error
        exponents = np.arange(0, self._head_width, 2, dtype=np.float64) / self._head_width
        turns = context / (2 * math.pi * self._rope_base() ** exponents)
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)

    def _refuse_unknown(self) -> None:
        activation = self._fields.get("hidden_activation") or self._fields.get(
            "hidden_act", self.family.activation
        )
        if activation != self.family.activation:
            raise self._unsupported(f"its activation is {activation}, not {self.family.activation}")
        for field in (
            "use_sliding_window",
            "use_bidirectional_attention",
            "attn_logit_softcapping",
        ):
            if self._fields.get(field):
                raise self._unsupported(f"{field} is {self._fields[field]}")
        if self._class == "MistralForCausalLM" and self._fields.get("sliding_window"):
            raise self._unsupported(f"sliding_window is {self._fields['sliding_window']}")

    def _rope(self) -> Mapping[str, Any]:
        """Return the parameters of the rotations, of full attention if there are two kinds."""
        rope = self._fields.get("rope_parameters") or self._fields.get("rope_scaling") or {}
        rope = rope.get("full_attention", rope)
        return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}

    def _rope_base(self) -> float:
        return float(self._rope().get("rope_theta") or self._real("rope_theta", 1e4))

    def _rope_scaling(self) -> Numbers:
        rope = self._rope()
        kind = rope["rope_type"]
        if kind in ("default", "llama3"):
            return {}
        if kind not in ("linear", "yarn") or not rope.get("factor"):
            raise self._unsupported(f"its rope scaling is {kind}")
        numbers: Numbers = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        if kind == "yarn":
            context = rope.get("original_max_position_embeddings")
            numbers["rope.scaling.original_context_length"] = int(
                context or self._whole("max_position_embeddings")
            )
            for field in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
                if rope.get(field) is not None:
                    raise self._unsupported(f"its rope scaling has {field}")
        return numbers

    def _gemma_numbers(self) -> Numbers:
        numbers: Numbers = {}
        layers = self._whole("num_hidden_layers")
        scale = self._real("query_pre_attn_scalar", float(self._head_width))
        expected = self._head_width
        if layers == _GEMMA_27B_LAYERS:
            expected = self._whole("hidden_size") // self.heads
        if scale != expected:
            raise self._unsupported(
                f"query_pre_attn_scalar is {scale:g}; llama.cpp uses {expected}"
            )
        if cap := self._fields.get("final_logit_softcapping"):
            numbers["final_logit_softcapping"] = float(cap)
        numbers["attention.sliding_window"] = self._whole("sliding_window")
        pattern = self._pattern(layers)
        if pattern != _GEMMA_PATTERN:
            numbers["attention.sliding_window_pattern"] = pattern
        both = self._fields.get("rope_parameters") or {}
        local = both.get("sliding_attention") or {}
        base = float(local.get("rope_theta") or self._real("rope_local_base_freq", _LOCAL_BASE))
        if base != _LOCAL_BASE:
            numbers["rope.freq_base_swa"] = base
        return numbers

    def _pattern(self, layers: int) -> int:
        """Return how many layers come before one sees the whole text again. Raises ModelInvalid."""
        kinds = self._fields.get("layer_types")
        if not kinds:
            return self._whole("sliding_window_pattern", _GEMMA_PATTERN)
        whole = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
        pattern = min(whole, default=layers) + 1
        if whole != list(range(pattern - 1, layers, pattern)):
            raise self._unsupported("the layers with full attention are not evenly spaced")
        return pattern

    def _whole(self, field: str, default: int = 0) -> int:
        value = self._fields.get(field)
        if value is None and default:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._unsupported(f"{field} is {value}; expected a whole number above 0")
        return value

    def _real(self, field: str, default: float) -> float:
        value = self._fields.get(field)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._unsupported(f"{field} is {value}; expected a number")
        return float(value)

    def sampling(self, generation: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        """Yield the recommended sampling of generation_config.json under the keys of GGUF."""
        for field, key in SAMPLING_KEYS.items():
            value = generation.get(field)
            if isinstance(value, int | float) and not isinstance(value, bool):
                number = int(value) if field == "top_k" else float(value)
                yield f"general.sampling.{key}", number

    def _unsupported(self, cause: str) -> ModelInvalid:
        return unsupported(self._name, cause)
