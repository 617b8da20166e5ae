"""EAGLE-3 heads: one layer that guesses from the states of three layers of its model. Imports no torch.

Li et al., 2025 (arXiv 2503.01840). Two forms of config.json: the flat one of SafeAILab's checkpoints, and
that of vLLM's speculators, with the layer in `transformer_layer_config`. Both name layers by the states before
them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from localchat.errors import ModelInvalid
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.reader import parse_config

OTHER_HEAD = (
    "Take an EAGLE-3 head that was trained for this model, or a small model of the same family."
)
_LAYER = "transformer_layer_config"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_STRANGE = ("norm_before_fc", "fc_norm")
"""Norms of the states that are joined."""


class EagleConfig(NamedTuple):
    """What a head has besides its layer."""

    vocabulary: int
    """Tokens that it can guess."""
    taps: tuple[int, ...]
    """Layers of its model before which it reads the states; empty: the usual three."""
    normed_residual: bool
    """The state is normed before it is added to what its layer computes."""
    normed_output: bool
    """It goes on from its normed states, in place of the sums."""


def is_eagle(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head."""
    named = raw.get("architectures")
    classes = [str(each) for each in named] if isinstance(named, list) else []
    return raw.get("speculators_model_type") == "eagle3" or any("Eagle3" in one for one in classes)


def parse_eagle(raw: Mapping[str, Any], name: str) -> tuple[ModelConfig, EagleConfig]:
    """The head as a model of one layer, and the rest. Raises ModelInvalid."""
    nested = raw.get(_LAYER)
    layer = {**raw, **nested} if isinstance(nested, dict) else dict(raw)
    strange = next((f"{key} true" for key in _STRANGE if raw.get(key)), "")
    kind = layer.get("model_type")
    layers = layer.get("num_hidden_layers")
    if kind != "llama" or layers != 1:
        strange = f"{layers} layers of {kind}"
    if strange:
        raise ModelInvalid(
            f"{name} is an EAGLE-3 head with {strange}, which cannot run here.", hint=OTHER_HEAD
        )
    config = parse_config(
        {**layer, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}, name
    )
    found = raw.get("draft_vocab_size") or config.vocabulary
    taps = raw.get(_TAPS) or ()
    if not isinstance(found, int) or not isinstance(taps, list | tuple):
        raise ModelInvalid(f"{name}: draft_vocab_size or {_TAPS} is unusable.", hint=OTHER_HEAD)
    return config, EagleConfig(
        found, tuple(taps), bool(raw.get("norm_before_residual")), bool(raw.get("norm_output"))
    )


def fitted(head: EagleConfig, own: ModelConfig, model: ModelConfig, name: str) -> EagleConfig:
    """The head with the layers that it reads of a model. Raises ModelInvalid for another model's."""
    layers = model.layers
    taps = head.taps or (2, layers // 2, layers - 3)
    for what, here, there in (
        ("states of", own.hidden, model.hidden),
        ("a vocabulary of", own.vocabulary, model.vocabulary),
    ):
        if here != there:
            raise ModelInvalid(
                f"{name} is the head of another model: it expects {what} {here:,}, and this one has {there:,}.",
                hint=OTHER_HEAD,
            )
    if any(not isinstance(tap, int) or not 0 <= tap < layers for tap in taps):
        raise ModelInvalid(
            f"{name} reads the states before the layers {taps}, and this model has {layers}.",
            hint=OTHER_HEAD,
        )
    return head._replace(taps=taps)
