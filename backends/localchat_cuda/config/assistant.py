"""Reads Gemma 4 assistants: small models that draft over the keys and values of a Gemma 4. Imports no torch.

Google, 2026 (huggingface.co/docs/transformers/model_doc/gemma4_assistant). config.json has the layers in
`text_config`. They have queries only.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from localchat.errors import ModelInvalid
from localchat_cuda.config.fields import ConfigFields
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.reader import parse_config

OTHER_ASSISTANT = (
    "Use the assistant of this model. Its name is the name of the model with -assistant at the end."
)
_CLASSES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")


class AssistantConfig(NamedTuple):
    """Settings of an assistant besides its layers."""

    columns: int
    """Columns of the model's residual."""
    centroids: int = 0
    """Groups of tokens with a centroid each; 0: the head computes the logits of all tokens."""
    active: int = 0
    """Groups whose tokens have logits."""
    sources: tuple[int, ...] = ()
    """Layer of the model whose keys and values each layer reads."""


def is_assistant(raw: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a Gemma 4 assistant."""
    classes = raw.get("architectures")
    return isinstance(classes, list) and any(name in _CLASSES for name in classes)


def parse_assistant(raw: Mapping[str, Any], name: str) -> tuple[ModelConfig, AssistantConfig]:
    """Parse the layers and the other settings of an assistant. Raises ModelInvalid."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ModelInvalid(f"{name}: config.json lacks text_config.", hint=OTHER_ASSISTANT)
    # Like a unified model, an assistant has no second embedding.
    layers = {**text, "architectures": ["Gemma4UnifiedForCausalLM"], "num_kv_shared_layers": 0}
    config = parse_config(layers, name)
    assert config.gemma is not None
    config = replace(config, gemma=replace(config.gemma, shared=config.layers))
    fields = ConfigFields(raw, name, OTHER_ASSISTANT)
    centroids = 0
    active = 0
    if raw.get("use_ordered_embeddings"):
        centroids = fields.integer("num_centroids", 2048)
        active = fields.integer("centroid_intermediate_top_k", 32)
    columns = fields.integer("backbone_hidden_size")
    assistant = AssistantConfig(columns, centroids, active)
    if centroids and (config.vocabulary % centroids or not 0 < assistant.active <= centroids):
        raise ModelInvalid(
            f"{name}: {config.vocabulary:,} tokens cannot have {centroids:,} centroids, of which "
            f"{assistant.active:,} are active.",
            hint=OTHER_ASSISTANT,
        )
    return config, assistant


def fitted(
    assistant: AssistantConfig, own: ModelConfig, model: ModelConfig, name: str
) -> tuple[ModelConfig, AssistantConfig]:
    """Return an assistant with the layers that it reads. Raises ModelInvalid if it belongs to another model."""
    for quantity, expected, actual in (
        ("the architecture", own.architecture, model.architecture),
        ("the hidden size", assistant.columns, model.hidden),
        ("the vocabulary size", own.vocabulary, model.vocabulary),
    ):
        if expected != actual:
            raise ModelInvalid(
                f"{name} is the assistant of another model: it expects {quantity} {expected}, and this "
                f"model has {actual}.",
                hint=OTHER_ASSISTANT,
            )
    assert own.gemma is not None
    assert model.gemma is not None
    sources = []
    for layer, full in enumerate(own.gemma.full):
        source = max((n for n in model.kv_layers if model.gemma.full[n] == full), default=-1)
        if source < 0 or _keys(own, layer) != _keys(model, source):
            raise ModelInvalid(
                f"{name} is the assistant of another model: its layer {layer} expects keys of another shape "
                "or rotation.",
                hint=OTHER_ASSISTANT,
            )
        sources.append(source)
    # The window of a query contains the query itself, which has no key here.
    windows = tuple(window and max(window - 1, 1) for window in own.windows)
    return replace(own, windows=windows), assistant._replace(sources=tuple(sources))


def _keys(config: ModelConfig, layer: int) -> tuple[object, ...]:
    """Return what decides whether a layer can read the keys of another one."""
    return (
        config.key_heads_of(layer),
        config.head_dim_of(layer),
        config.window(layer),
        config.rotation_of(layer),
    )
