"""Text of the settings screens: label and value of each setting."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec
from rich.cells import cell_len
from textual.content import Content

from localchat.config.parameters import MODEL_DEFAULT, PARAMETERS, Label
from localchat.units import duration, tokens

if TYPE_CHECKING:
    from localchat.config.settings import Settings
    from localchat.engine.interface import EngineInfo


LABELS: Final[dict[str, Label]] = {
    key: parameter.label for key, parameter in PARAMETERS.items() if parameter.label is not None
}
"""Rows of the settings screen by key, in order."""
_LABEL_CELLS: Final = max(len(label.text) for label in LABELS.values()) + 2


def setting_line(key: str, value: str, style: str, width: int, head: str = "") -> Content:
    """Return `head`, label and value. A value that is too wide moves below the label."""
    before = Content.styled(head, "$primary")
    shown = Content.styled(value, style)
    if len(head) + _LABEL_CELLS + cell_len(value) <= width:
        return before + LABELS[key].text.ljust(_LABEL_CELLS) + shown
    return before + f"{LABELS[key].text}\n{' ' * len(head)}  " + shown


def matches(key: str, text: str) -> bool:
    """Return True if a filter matches the key, label or group of a setting."""
    label = LABELS[key]
    words = f"{key} {key.replace('_', ' ')} {label.text} {label.group}".lower()
    return text.strip().lower() in words


def value_words(key: str, value: object) -> str:
    """Format a value with its unit, as `yes` or `no`, or as the default."""
    label = LABELS[key]
    if value is None or value in ("", (), {}):
        return label.unset or PARAMETERS[key].default
    if value == "auto" and label.unset:
        return label.unset
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "keep_alive" and value == -1:
        return "forever"
    if key == "keep_alive" and isinstance(value, int):
        return duration(value)
    if key == "threads" and value == 0:
        return "every physical core"
    if label.unit == "tokens" and isinstance(value, int):
        return tokens(value)
    if not isinstance(value, str):
        value = msgspec.json.encode(value).decode()
    return f"{value} {label.unit}".rstrip()


def effective_words(
    key: str, settings: "Settings", info: "EngineInfo | None", recommended: "dict[str, float]"
) -> str:
    """Return the value in effect for this conversation, and its source.

    `recommended` holds the sampling that the makers of the model recommend, by key.
    """
    value = getattr(settings, key)
    local = info is not None and info.backend != "remote"
    if info is not None and local and (text := _load_words(key, value, info)):
        return text
    if value is not None:
        return value_words(key, value)
    if key in recommended:
        return f"{recommended[key]:g}, recommended for this model"
    if info is not None and local and info.sampling and LABELS[key].group == "Sampling":
        return _sampling_words(key, info.sampling)
    return value_words(key, value)


def _load_words(key: str, value: object, info: "EngineInfo") -> str:
    """Format a value that the load of a local model decided; empty for other keys."""
    if key == "context_length":
        text = tokens(info.context_tokens)
        if value:
            return text
        if info.context_tokens >= info.context_train > 0:
            return f"{text}, the model's limit"
        return f"{text}, as many as fit"
    if key == "kv_cache_type" and value is None and info.kv_type:
        return f"{info.kv_type}, chosen for this model"
    if key == "threads" and not value:
        return f"{info.threads}, every physical core"
    if key == "gpu_layers":
        text = f"{info.gpu_layers} of {info.layers}"
        if value == "auto":
            return f"{text}, chosen for this model"
        return text
    return ""


def _sampling_words(key: str, sampling: Mapping[str, float]) -> str:
    """Format the model's own value of a sampling setting."""
    if key in sampling:
        return f"{sampling[key]:g}, default"
    default = value_words(key, None)
    return "off" if default == MODEL_DEFAULT else default
