"""Settings and their sources: flag over environment over settings file over default.

A key has one name everywhere: `context_length` in the settings file (settings_file.py),
`LOCALCHAT_CONTEXT_LENGTH` in the environment, and its flag in `parameters.py`. `Settings` holds types and
defaults.
"""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta, field

from localchat.config.parameters import PARAMETERS, SAMPLERS
from localchat.config.sampling import SamplingNumbers, SamplingValues
from localchat.errors import UsageError
from localchat.suggestions import closest, did_you_mean

_MOST: Final = 2**31 - 1
"""Largest whole number that the fields of the engine and of llama.cpp hold."""
_Count = Annotated[int, Meta(ge=1, le=_MOST)]
_Whole = Annotated[int, Meta(ge=0, le=_MOST)]
_Gigabytes = Annotated[float, Meta(gt=0, le=1_000_000)]


class Settings(SamplingNumbers, frozen=True, kw_only=True):
    """All settings with type and default. None leaves a value to the program or the model.

    Size: one field per setting. The ranges of the sampling are in the table.
    """

    model: Annotated[str, Meta(min_length=1)] | None = None
    system: str | None = None
    remote: Annotated[str, Meta(min_length=1)] | None = None
    backend: Annotated[str, Meta(min_length=1)] | None = None
    llamacpp_library: Annotated[str, Meta(min_length=1)] | None = None
    speculation: bool = True
    draft: Annotated[str, Meta(min_length=1)] | None = None
    mmproj: Annotated[str, Meta(min_length=1)] | None = None
    lora: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(max_length=16)] = ()
    context_length: _Count | None = None
    kv_cache_type: Literal["f16", "bf16", "fp8", "fp8_e4m3", "q8_0", "q4_0"] | None = None
    cache_ram_mib: _Whole | None = None
    cache_disk_gb: Annotated[float, Meta(ge=0, le=1_000_000)] = 10.0
    kv_gb: _Gigabytes | None = None
    vram_gb: _Gigabytes | None = None
    gpus: Annotated[int, Meta(ge=1, le=64)] | Literal["auto"] = 1
    gpu_layers: _Whole | Literal["auto", "all"] = "auto"
    experts_on_cpu: _Whole | Literal["auto"] = "auto"
    require_gpu: bool = False
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    quantize: Literal["fp8", "int8", "int4"] | None = None
    anyway: bool = False
    window_only: bool = False
    dummy_weights: bool = False
    think: Literal["auto", "on", "off"] = "auto"
    think_budget: _Whole | None = None
    hide_reasoning: bool = False
    max_tokens: _Count | None = None
    loop_guard: bool = True
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(max_length=16)] = ()
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    dry_sequence_breakers: (
        Annotated[
            tuple[Annotated[str, Meta(min_length=1, max_length=40)], ...],
            Meta(min_length=1, max_length=64),
        ]
        | None
    ) = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = field(default_factory=dict)
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    theme: Literal["auto", "dark", "light", "high-contrast", "ansi", "ansi-light"] = "auto"
    pictures: Literal["auto", "kitty", "sixel", "blocks", "off"] = "auto"
    reduced_motion: bool = False
    screen_reader: bool = False
    color: bool = True
    stats: bool = False
    quiet: bool = False
    history: bool = True
    offline: bool = False
    attach: bool = True
    keep_alive: Annotated[int, Meta(ge=-1, le=_MOST)] = 300
    tools: str = "off"
    root: Annotated[str, Meta(min_length=1)] | None = None
    tool_rounds: Annotated[int, Meta(ge=1, le=1000)] = 25


LISTS: Final = ("stop", "lora", "dry_sequence_breakers")
"""Keys with a list of texts."""
_TOO_LARGE: Final = re.compile(r"Expected `int` <= (\d+)")
"""Message of msgspec about a number above its bound."""

SAMPLING_KEYS: Final = tuple(
    key
    for key, parameter in PARAMETERS.items()
    if parameter.label is not None and parameter.label.group == "Sampling"
)
"""Keys that are also fields of a request's `Sampling`."""
DEFAULT_SAMPLING: Final[Mapping[str, float]] = {
    key: value for key, value in asdict(SamplingValues()).items() if value != SAMPLERS[key].off
}
"""Sampling of the engine, if neither the user nor the model's maker chose it."""
REMOVED: Final[Mapping[str, str]] = {
    "technical_metrics": "metrics always use TTFT, tok/s and KV cache",
    "metrics.terms": "metrics always use TTFT, tok/s and KV cache",
    "composer.open_chip": "composer.editor (Ctrl+G) shows the whole message",
    "panel.previous": "Up scrolls the panel",
    "panel.next": "Down scrolls the panel",
    "screen.palette": "F1 lists all commands and keys, and / runs them",
    "chat.search": "screen.history (Ctrl+R) searches all conversations",
    "head_int8": "the exact output head is as fast",
    "presets": "`config set system TEXT --for MODEL` and shell aliases do the same",
    "prices": "`localchat bench MODEL --machine-hour PRICE` takes the price",
    "routes": "a request always goes to the one model that it names",
}
"""Settings, key actions and sections of earlier releases, with the reason of their removal."""


_PREFIX: Final = "LOCALCHAT_"
_OTHER_VARIABLES: Final = ("API_KEY", "CONFIG", "DATA_DIR", "DEBUG", "LAUNCH_KEY", "MODELS")
"""Variables that are not settings, without the prefix."""
_TEST_VARIABLES: Final = (
    "BENCH_STEP_US",
    "HISTORIES",
    "RANDOM_CONFIGS",
    "REAL_MODELS",
    "TEST_MEDIA",
)
"""Variables of the program's tests and benchmarks."""
_KUBERNETES: Final = re.compile(r"SERVICE_(HOST|PORT)\w*|PORT|PORT_\d+_\w+")
"""Variables that Kubernetes and Docker add for a service called localchat."""


class Given(NamedTuple):
    """A value from outside, not yet checked."""

    value: object
    origin: str
    """Source of the value, as errors and `config show` name it."""


class Resolved(NamedTuple):
    """Settings in effect."""

    settings: Settings
    origins: Mapping[str, str]
    """Source of every key; `default` if nothing set it."""


def variable(key: str) -> str:
    """Return the environment variable of a key."""
    return f"{_PREFIX}{key.upper()}"


def check_key(key: str, where: str) -> None:
    """Raise UsageError, naming the nearest key, unless `key` is a setting."""
    if key in REMOVED:
        raise UsageError(f"{where}: the setting {key} was removed", hint=REMOVED[key])
    if key not in PARAMETERS:
        raise UsageError(
            f"{where}: there is no setting {key!r}", hint=did_you_mean(key, PARAMETERS)
        )


def find_key(name: str, where: str) -> str:
    """Return the key for its own name or its flag's, such as `ctx` or `kv-type`. Raises UsageError."""
    flag = name.lower().removeprefix("--").replace("_", "-")
    for key, parameter in PARAMETERS.items():
        # The flag of a switch that is on by default turns it off, so its name means the opposite.
        flags = (parameter.flag, *parameter.names.split()[:-1])
        if f"--{flag}" in flags and not flag.startswith("no-"):
            return key
    key = flag.replace("-", "_")
    check_key(key, where)
    return key


def convert(key: str, entry: Given) -> object:
    """Convert a value to the type of its key.

    Text from a flag or the environment is parsed leniently: "12" is a number. Values of a file are not. Raises
    UsageError with origin, key, value and the valid values.
    """
    kind = _types()[key]
    value = _parse(key, entry.value)
    try:
        return msgspec.convert(value, kind, strict=not isinstance(value, str), str_keys=True)
    except msgspec.ValidationError as problem:
        texts = [entry.value]
        if key in LISTS and isinstance(value, list):
            texts = value
        shown = ", ".join(map(repr, texts))[:80] or "an empty list"
        subject = entry.origin or key
        # A flag and a command name their key already.
        if entry.origin and not subject.startswith(("--", "/set ")):
            subject += f": {key}"
        raise UsageError(f"{subject} must be {_valid(key, problem)}, not {shown}") from problem


def _valid(key: str, problem: msgspec.ValidationError) -> str:
    """Return the valid values, or else the bound that was exceeded."""
    bound = _TOO_LARGE.match(str(problem))
    valid = PARAMETERS[key].valid
    if bound is None or bound[1] in valid:
        return valid
    return f"at most {int(bound[1]):,}"


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Return the settings of the environment. An empty variable counts as not set."""
    return {
        key: Given(environ[variable(key)], variable(key))
        for key in PARAMETERS
        if environ.get(variable(key))
    }


def unread_variables(environ: Mapping[str, str], named: Container[str] = ()) -> Iterator[str]:
    """Yield a sentence for each variable of ours that has no effect.

    `named`: variables that the settings file names, such as the key of a remote.
    """
    suffixes = {*map(str.upper, PARAMETERS), *_OTHER_VARIABLES, *_TEST_VARIABLES}
    for name, value in environ.items():
        suffix = name.removeprefix(_PREFIX)
        is_read = suffix in suffixes or name in named or _KUBERNETES.fullmatch(suffix)
        if not value or suffix == name or is_read:
            continue
        if suffix.lower() in REMOVED:
            yield f"{name} was removed, because {REMOVED[suffix.lower()]}. Unset it."
            continue
        spellings = dict(zip(suffixes, suffixes, strict=True))
        for key, parameter in PARAMETERS.items():
            for flag in (parameter.flag, *parameter.names.split()):
                spellings.setdefault(flag.lstrip("-").replace("-", "_"), key)
        advice = "`localchat config` lists the settings"
        if nearest := closest(suffix, spellings):
            advice = f"did you mean {variable(spellings[nearest[0]])}?"
        yield f"{name} has no effect; {advice}"


def resolve(*layers: Mapping[str, Given]) -> Resolved:
    """Merge layers of settings. Later layers override earlier ones. Raises UsageError."""
    values: dict[str, object] = {}
    origins = dict.fromkeys(PARAMETERS, "default")
    for layer in layers:
        for key, entry in layer.items():
            values[key] = convert(key, entry)
            origins[key] = entry.origin
    return Resolved(msgspec.convert(values, Settings), origins)


def offline_reason(resolved: Resolved, environ: Mapping[str, str]) -> str:
    """Return the setting or Hugging Face variable that turns the network off; empty if none does."""
    if resolved.settings.offline:
        return resolved.origins["offline"]
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environ.get(name, "").lower() in ("1", "on", "true", "yes"):
            return name
    return ""


@cache
def _types() -> dict[str, Any]:
    """Return the type of each key without None, which no source can express."""
    hints = get_type_hints(Settings, include_extras=True)
    types = {key: _without_none(hint) for key, hint in hints.items()}
    for key, sampler in SAMPLERS.items():
        low, high = sampler.setting_range
        types[key] = Annotated[types[key], Meta(ge=low, le=min(high, _MOST))]
    return types


def _without_none(hint: Any) -> Any:  # noqa: ANN401 - a type expression has no type
    parts = [part for part in get_args(hint) if part is not type(None)]
    if type(None) in get_args(hint) and len(parts) == 1:
        return parts[0]
    return hint


def _lower_choice(kind: Any, value: object) -> object:  # noqa: ANN401 - a type expression has no type
    """Lower-case a value of a key with a list of choices: Q8_0 becomes q8_0."""
    choices = [choice for part in (kind, *get_args(kind)) for choice in get_args(part)]
    if isinstance(value, str) and value.lower() in (*choices, *get_args(kind)):
        return value.lower()
    return value


def _parse(key: str, value: object) -> object:
    """Parse text: `4k` as 4,096, and the keys that take several values as JSON or a single text."""
    if isinstance(value, str) and key in ("context_length", "max_tokens", "think_budget"):
        return _tokens(value)
    if not isinstance(value, str) or key not in (*LISTS, "logit_bias"):
        return _lower_choice(_types()[key], value)
    try:
        parsed: object = msgspec.json.decode(value)
    except msgspec.DecodeError:
        parsed = value
    if key == "logit_bias" or isinstance(parsed, list):
        return parsed
    return [value]


def _tokens(text: str) -> str:
    """Expand a unit of 1,024, as in the context lengths of models: `4k` becomes `4096`."""
    number = text[:-1]
    unit = text[-1:].lower()
    if unit != "k" or not number.replace(".", "", 1).isdecimal():
        return text
    return str(int(float(number) * 1024))
