"""Settings as people read them: a label, a unit, a group, and the value in force."""

from typing import TYPE_CHECKING, Final

import msgspec
from rich.cells import cell_len
from textual.content import Content

from localchat.config.parameters import PARAMETERS, Label
from localchat.units import duration, tokens

if TYPE_CHECKING:
    from localchat.config.settings import Settings
    from localchat.engine.interface import EngineInfo


LABELS: Final[dict[str, Label]] = {
    key: parameter.label for key, parameter in PARAMETERS.items() if parameter.label is not None
}
"""Rows of the settings screen by key, in order."""
_LABEL_CELLS: Final = 24


def label_column(key: str) -> str:
    """The label of a setting, padded to the width of its column."""
    return f"{LABELS[key].text:<{_LABEL_CELLS}}"


def setting_line(key: str, value: str, style: str, width: int, head: str = "") -> Content:
    """The label of a setting and its value, which stands below the label where it does not fit beside it.

    `head`: what stands before them."""
    before = Content.styled(head, "$primary")
    shown = Content.styled(value, style)
    if len(head) + _LABEL_CELLS + cell_len(value) <= width:
        return before + label_column(key) + shown
    return before + f"{LABELS[key].text}\n{' ' * len(head)}  " + shown


def matches(key: str, text: str) -> bool:
    """Whether a filter matches a setting, by its key, label or group."""
    label = LABELS[key]
    words = f"{key} {key.replace('_', ' ')} {label.text} {label.group}".lower()
    return text.strip().lower() in words


def value_words(key: str, value: object) -> str:
    """A value as people read it: with its unit, `yes` and `no`, or what happens without one."""
    label = LABELS[key]
    if value is None or value in ("", (), {}):
        return label.unset or PARAMETERS[key].default
    if value == "auto" and label.unset:
        return label.unset
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "keep_alive" and isinstance(value, int):
        return "forever" if value < 0 else duration(value)
    if key == "threads" and value == 0:
        return "every physical core"
    if label.unit == "tokens" and isinstance(value, int):
        return tokens(value)
    shown = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return f"{shown} {label.unit}".rstrip()


def effective_words(
    key: str, settings: "Settings", info: "EngineInfo | None", recommended: "dict[str, float]"
) -> str:
    """The value that is in force for this conversation, and who chose it. `recommended`: sampling that the
    makers of the model recommend, by key."""
    value = getattr(settings, key)
    local = info if info is not None and info.backend != "remote" else None
    if key == "context_length" and local is not None:
        most = local.context_tokens >= local.context_train > 0
        chosen = "" if value else ", the model's limit" if most else ", as many as fit"
        return f"{tokens(local.context_tokens)}{chosen}"
    if key == "kv_cache_type" and value is None and local is not None and local.kv_type:
        return f"{local.kv_type}, chosen for this model"
    if key == "threads" and not value and local is not None:
        return f"{local.threads}, every physical core"
    if key == "gpu_layers" and local is not None:
        chosen = ", chosen for this model" if value == "auto" else ""
        return f"{local.gpu_layers} of {local.layers}{chosen}"
    if value is None and key in recommended:
        return f"{recommended[key]:g}, recommended for this model"
    if value is None and local is not None and local.sampling and LABELS[key].group == "Sampling":
        if key in local.sampling:
            return f"{local.sampling[key]:g}, model default"
        return "off" if key != "seed" else LABELS[key].unset
    return value_words(key, value)
