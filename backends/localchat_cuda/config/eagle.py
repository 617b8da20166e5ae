"""Reads EAGLE-3 heads: one layer that drafts from the states of three layers of a model.

Imports no torch. Li et al., 2025 (arXiv 2503.01840). config.json has two forms: SafeAILab's is flat. That of
vLLM's speculators has the layer in `transformer_layer_config`. Both name layers by the states before them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from localchat.errors import ModelInvalid
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.reader import parse_config

OTHER_HEAD = (
    "Use an EAGLE-3 head that was trained for this model, or a small model of the same family."
)
_LAYER = "transformer_layer_config"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_UNSUPPORTED_NORMS = ("norm_before_fc", "fc_norm")
"""Norms of the states before or after they are joined."""


class EagleConfig(NamedTuple):
    """Settings of a head besides its layer."""

    vocabulary: int
    """Tokens that the head can draft."""
    taps: tuple[int, ...]
    """Layers of the model before which the head reads the states; empty: the usual three."""
    normed_residual: bool
    """The residual is the normed state, not the state itself."""
    normed_output: bool
    """The next draft token starts from the normed state, not from the residual."""


def is_eagle(raw: Mapping[str, Any]) -> bool:
    """Return True for the config.json of an EAGLE-3 head."""
    if raw.get("speculators_model_type") == "eagle3":
        return True
    classes = raw.get("architectures")
    return isinstance(classes, list) and any("Eagle3" in str(name) for name in classes)


def parse_eagle(raw: Mapping[str, Any], name: str) -> tuple[ModelConfig, EagleConfig]:
    """Parse a head into a model of one layer and its other settings. Raises ModelInvalid."""
    layer = dict(raw)
    nested = raw.get(_LAYER)
    if isinstance(nested, dict):
        layer |= nested
    unsupported = next((f"{key} true" for key in _UNSUPPORTED_NORMS if raw.get(key)), "")
    kind = layer.get("model_type")
    layers = layer.get("num_hidden_layers")
    if kind != "llama" or layers != 1:
        unsupported = f"{layers} layers of {kind}"
    if unsupported:
        raise ModelInvalid(
            f"{name} is an EAGLE-3 head with {unsupported}, which is not supported.",
            hint=OTHER_HEAD,
        )
    config = parse_config(
        {**layer, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}, name
    )
    vocabulary = raw.get("draft_vocab_size") or config.vocabulary
    taps = raw.get(_TAPS) or ()
    if not isinstance(vocabulary, int) or not isinstance(taps, list | tuple):
        raise ModelInvalid(f"{name}: draft_vocab_size or {_TAPS} is invalid.", hint=OTHER_HEAD)
    head = EagleConfig(
        vocabulary,
        tuple(taps),
        normed_residual=bool(raw.get("norm_before_residual")),
        normed_output=bool(raw.get("norm_output")),
    )
    return config, head


def fitted(head: EagleConfig, own: ModelConfig, model: ModelConfig, name: str) -> EagleConfig:
    """Return the head with the layers that it reads. Raises ModelInvalid if it belongs to another model."""
    layers = model.layers
    taps = head.taps or (2, layers // 2, layers - 3)
    for quantity, expected, actual in (
        ("the hidden size", own.hidden, model.hidden),
        ("the vocabulary size", own.vocabulary, model.vocabulary),
    ):
        if expected != actual:
            raise ModelInvalid(
                f"{name} is the head of another model: it expects {quantity} {expected:,}, and this "
                f"model has {actual:,}.",
                hint=OTHER_HEAD,
            )
    if any(not isinstance(tap, int) or not 0 <= tap < layers for tap in taps):
        raise ModelInvalid(
            f"{name} reads the states before the layers {taps}, and this model has {layers}.",
            hint=OTHER_HEAD,
        )
    return head._replace(taps=taps)
