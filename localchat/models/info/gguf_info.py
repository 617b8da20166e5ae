"""Describes a GGUF model from its header: sizes, templates, abilities and limits."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from localchat.fit.memory_plan import CacheSpec, kv_layer_bytes, kv_types
from localchat.model_files.architecture import ENCODERS, RANK, ModelShape, model_shape, pooling_of
from localchat.model_files.gguf import Array, Header
from localchat.model_files.projector import Projector, find_projector
from localchat.units import size, tokens

_TEMPLATE: Final = "tokenizer.chat_template"
_CODE: Final = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_STRINGS: Final = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_SWITCHES: Final = frozenset({"enable_thinking", "thinking", "reasoning_effort"})
_THOUGHTS: Final = (
    "<think>",
    "<|channel|>analysis",
    "<|START_THINKING|>",
    "[THINK]",
    "<seed:think>",
)
_MIDDLE: Final = ("tokenizer.ggml.fim_mid_token_id", "tokenizer.ggml.middle_token_id")
_MIDDLE_TOKENS: Final = frozenset(
    {
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    }
)
"""Tokens that llama.cpp uses for the middle if the header names none."""

Ability: TypeAlias = Literal["chat", "tools", "thinking", "infill", "embedding"]
"""Abilities that programs ask for. `embedding` excludes the others."""

_EMBEDDING_CAN: Final = ("It gives embeddings: a vector of numbers for each text.",)
_READS_TEXT: Final = "It reads no images and hears no sound here."
_EMBEDDING_CANNOT: Final = (
    _READS_TEXT,
    "It cannot generate text: chats and completions are rejected.",
)

VOCABULARY: Final = "tokenizer.ggml.tokens"
"""Key to pass to read_header to learn whether a model fills in the middle."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Description of a model from its files.

    Size: `show` prints each field.
    """

    architecture: str
    parameters: int
    quantization: str
    context_tokens: int
    layers: int
    vocab_size: int
    license: str
    """License as the file names it. Empty if it names none."""
    templates: Mapping[str, str]
    """Chat templates by name, `default` first."""
    abilities: frozenset[Ability]
    can: tuple[str, ...]
    """Sentences about abilities."""
    cannot: tuple[str, ...]
    """Sentences about limits."""
    attention: str = ""
    """Kind of attention, with the ratio of heads."""
    kv_bytes_per_token: int | None = None
    """KV bytes of all layers in f16. None for a checkpoint, whose planner alone knows the layers."""
    kv_types: tuple[str, ...] = ()
    state_bytes: int | None = None
    """State of recurrent layers per conversation. None for a checkpoint."""


def describe_gguf(header: Header) -> ModelDescription:
    """Describe the model of a checked header (open_gguf.read_header, with VOCABULARY)."""
    shape = model_shape(header)
    templates = _templates(header)
    abilities = abilities_of(templates, infill=_fills_in(header))
    can, cannot = sentences_of(abilities, templates)
    more, less = _shape_sentences(shape)
    if projector := find_projector(header):
        can = (*can, _reading(projector))
        cannot = tuple(sentence for sentence in cannot if sentence != _READS_TEXT)
    if pooling := pooling_of(header):
        # The backend objects to a reranker, so nothing is listed that it can do.
        abilities = frozenset()
        can = ()
        if pooling != RANK:
            abilities = frozenset({"embedding"})
            can = _EMBEDDING_CAN
        cannot = _EMBEDDING_CANNOT
        more = ()
        less = ()
    return ModelDescription(
        architecture=header.architecture,
        parameters=header.parameters,
        quantization=header.quantization,
        context_tokens=shape.context_train,
        layers=len(shape.layers),
        vocab_size=shape.vocab_size,
        license=_text(header, "general.license.name") or _text(header, "general.license"),
        templates=templates,
        kv_bytes_per_token=0 if header.architecture in ENCODERS else _bytes_per_token(shape),
        kv_types=kv_types(shape),
        state_bytes=sum(4 * layer.state for layer in shape.layers),
        abilities=abilities,
        can=(*can, *more),
        cannot=(*cannot, *less),
        attention="" if header.architecture in ENCODERS else _attention(shape),
    )


def _reading(projector: Projector) -> str:
    """Return the sentence about a model that sees or hears."""
    verbs = {"image": "sees pictures", "audio": "hears sound"}
    abilities = " and ".join(verbs[kind] for kind in projector.kinds)
    return f"It {abilities}, with {projector.path.name} ({size(projector.file_bytes)})."


def _bytes_per_token(shape: ModelShape) -> int:
    """Return the KV bytes of one token in f16. The cache also stores all tokens of sliding-window layers."""
    return sum(kv_layer_bytes(shape, CacheSpec(1, 1, 0)))


def _attention(shape: ModelShape) -> str:
    """Return the kind of attention with the ratio of heads. Empty if no layer attends."""
    keys = sorted(layer.keys for layer in shape.layers if layer.keys)
    if not keys or not shape.head_width or not shape.heads:
        return ""
    kv_heads = max(keys[len(keys) // 2] // shape.head_width, 1)
    if kv_heads >= shape.heads:
        kind = f"multi-head, {shape.heads} heads"
    elif kv_heads == 1:
        kind = f"multi-query, {shape.heads} heads on 1 KV head"
    else:
        kind = f"grouped-query, {shape.heads} heads on {kv_heads} KV heads"
    sliding = sum(layer.sliding for layer in shape.layers)
    if sliding:
        return f"{kind}, {sliding} of {len(shape.layers)} layers slide"
    return kind


def _text(header: Header, key: str) -> str:
    value = header.metadata.get(key)
    if isinstance(value, str):
        return value.strip()
    return ""


def _templates(header: Header) -> dict[str, str]:
    templates = {
        key.removeprefix(_TEMPLATE).lstrip(".") or "default": value
        for key, value in sorted(header.metadata.items())
        if (key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")) and isinstance(value, str)
    }
    return {name: source for name, source in templates.items() if source.strip()}


def _names(templates: Mapping[str, str]) -> frozenset[str]:
    """Return the identifiers in the templates' code, without string literals."""
    code = " ".join(part for source in templates.values() for part in _CODE.findall(source))
    return frozenset(re.findall(r"[A-Za-z_]\w*", _STRINGS.sub(" ", code)))


def _fills_in(header: Header) -> bool:
    if any(key in header.metadata for key in _MIDDLE):
        return True
    vocabulary = header.metadata.get(VOCABULARY)
    return isinstance(vocabulary, Array) and not _MIDDLE_TOKENS.isdisjoint(vocabulary.values or ())


def abilities_of(templates: Mapping[str, str], *, infill: bool) -> frozenset[Ability]:
    """Return the abilities that the templates show. infill: the model has a fill-in-the-middle token."""
    names = _names(templates)
    thoughts = any(sign in source for source in templates.values() for sign in _THOUGHTS)
    abilities: dict[Ability, bool] = {
        "chat": bool(templates),
        "tools": "tools" in names,
        "thinking": bool(names & _SWITCHES) or thoughts,
        "infill": infill,
    }
    return frozenset(ability for ability, has_it in abilities.items() if has_it)


def sentences_of(
    abilities: frozenset[Ability], templates: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return sentences on what a model can do, and on what it cannot."""
    can = []
    cannot = [_READS_TEXT]
    if templates:
        can.append("It has a chat template.")
    else:
        cannot.append(
            "It has no chat template: it sees conversations as plain text, and may be a base model."
        )
    if "tools" in abilities:
        can.append("Its template supports tools.")
    elif templates:
        cannot.append("Its template does not support tools.")
    if _names(templates) & _SWITCHES:
        can.append("Its reasoning can be turned on and off (--think).")
    elif "thinking" in abilities:
        can.append("It reasons before it answers.")
    if "infill" in abilities:
        can.append("It fills in the middle of code.")
    else:
        cannot.append("It does not fill in the middle of code.")
    return tuple(can), tuple(cannot)


def _shape_sentences(shape: ModelShape) -> tuple[tuple[str, ...], tuple[str, ...]]:
    can = []
    cannot = []
    if shape.recurrent:
        cannot.append(
            "It has a recurrent state that cannot be cut back: an earlier prompt is reused only from where "
            "the state was saved."
        )
    if shape.window:
        can.append(
            f"Some of its layers see only the last {tokens(shape.window)}. --window-only saves memory by "
            "caching no more for them."
        )
    if shape.head:
        can.append("It has a prediction head, which can draft its next tokens.")
    if "q8_0" not in kv_types(shape):
        cannot.append("Its KV cache cannot be quantized.")
    return tuple(can), tuple(cannot)
