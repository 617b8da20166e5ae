"""Settings as people read them: a label, a unit, a group, and the value in force."""

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from rich.cells import cell_len
from textual.content import Content

from localchat.units import duration, tokens

if TYPE_CHECKING:
    from localchat.config.settings import Settings
    from localchat.engine.interface import EngineInfo


class SettingLabel(NamedTuple):
    """A setting for people."""

    group: str
    label: str
    unit: str = ""
    unset: str = ""
    """What happens where it has no value."""


LABELS: Final = {
    "model": SettingLabel("Model", "Model", unset="the last one used"),
    "system": SettingLabel("Model", "Instructions", unset="none"),
    "remote": SettingLabel("Model", "Server that answers", unset="this computer"),
    "backend": SettingLabel("Model", "Backend", unset="chosen for each model"),
    "llamacpp_library": SettingLabel("Model", "llama.cpp library", unset="found automatically"),
    "speculation": SettingLabel("Model", "Guess ahead"),
    "draft": SettingLabel("Model", "Draft model", unset="none"),
    "context_length": SettingLabel("Memory", "Context", "tokens", "the largest that fits"),
    "kv_cache_type": SettingLabel("Memory", "KV cache type", unset="chosen for each model"),
    "cache_ram_mib": SettingLabel("Memory", "RAM for idle chats", "MiB", "chosen automatically"),
    "cache_disk_gb": SettingLabel("Memory", "Disk for idle chats", "GB"),
    "kv_gb": SettingLabel("Memory", "KV cache limit", "GB", "none"),
    "vram_gb": SettingLabel("Memory", "GPU memory limit", "GB", "none"),
    "gpu_layers": SettingLabel("Memory", "Layers on the GPU", unset="as many as fit"),
    "experts_on_cpu": SettingLabel("Memory", "Experts kept in RAM", "layers", "as few as possible"),
    "require_gpu": SettingLabel("Memory", "Refuse without a GPU"),
    "threads": SettingLabel("Memory", "Threads"),
    "head_int8": SettingLabel("Memory", "Output head in 8 bits"),
    "quantize": SettingLabel("Memory", "Round a bf16 model to", unset="as stored"),
    "anyway": SettingLabel("Memory", "Load if it may not fit"),
    "window_only": SettingLabel("Memory", "Cache only sliding windows"),
    "think": SettingLabel("Answers", "Reasoning"),
    "think_budget": SettingLabel("Answers", "Longest reasoning", "tokens", "no limit"),
    "hide_reasoning": SettingLabel("Answers", "Hide the reasoning"),
    "max_tokens": SettingLabel("Answers", "Longest answer", "tokens", "a quarter of the context"),
    "loop_guard": SettingLabel("Answers", "End repeating answers"),
    "stop": SettingLabel("Answers", "Stop at", unset="nothing"),
    "n": SettingLabel("Answers", "Answers at once"),
    "temperature": SettingLabel("Sampling", "Temperature", unset="model default"),
    "top_k": SettingLabel("Sampling", "Top-k", unset="model default"),
    "top_p": SettingLabel("Sampling", "Top-p", unset="model default"),
    "min_p": SettingLabel("Sampling", "Min-p", unset="model default"),
    "typical_p": SettingLabel("Sampling", "Typical-p", unset="model default"),
    "repetition_penalty": SettingLabel("Sampling", "Repetition penalty", unset="model default"),
    "frequency_penalty": SettingLabel("Sampling", "Frequency penalty", unset="model default"),
    "presence_penalty": SettingLabel("Sampling", "Presence penalty", unset="model default"),
    "logit_bias": SettingLabel("Sampling", "Logit bias", unset="none"),
    "seed": SettingLabel("Sampling", "Seed", unset="random"),
    "theme": SettingLabel("Screen", "Theme"),
    "reduced_motion": SettingLabel("Screen", "Reduced motion"),
    "color": SettingLabel("Screen", "Colours"),
    "stats": SettingLabel("Screen", "Metrics after an answer"),
    "quiet": SettingLabel("Screen", "Quiet command line"),
    "history": SettingLabel("Privacy", "Keep conversations"),
    "offline": SettingLabel("Privacy", "Offline"),
    "attach": SettingLabel("Privacy", "Use a running server"),
    "keep_alive": SettingLabel("Privacy", "Server keeps a model"),
}
"""By key, in the order of the settings screen. Switches for tests alone are missing; the file has them."""

_LABEL_CELLS: Final = 24


def label_column(key: str) -> str:
    """The label of a setting, padded to the width of its column."""
    return f"{LABELS[key].label:<{_LABEL_CELLS}}"


def setting_line(key: str, value: str, style: str, width: int, head: str = "") -> Content:
    """The label of a setting and its value, which stands below the label where it does not fit beside it.

    `head`: what stands before them."""
    before = Content.styled(head, "$primary")
    shown = Content.styled(value, style)
    if len(head) + _LABEL_CELLS + cell_len(value) <= width:
        return before + label_column(key) + shown
    return before + f"{LABELS[key].label}\n{' ' * len(head)}  " + shown


def matches(key: str, text: str) -> bool:
    """Whether a filter matches a setting, by its key, label or group."""
    label = LABELS[key]
    words = f"{key} {key.replace('_', ' ')} {label.label} {label.group}".lower()
    return text.strip().lower() in words


def value_words(key: str, value: object) -> str:
    """A value as people read it: with its unit, `yes` and `no`, or what happens without one."""
    label = LABELS[key]
    if value is None or value in ("", (), {}):
        return label.unset or "not set"
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
