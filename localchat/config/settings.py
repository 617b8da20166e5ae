"""Settings and their sources: flag over environment over settings file over default.

A key has one name everywhere: `context_length` in the settings file (settings_file.py),
`LOCALCHAT_CONTEXT_LENGTH` in the environment, and its flag in `parameters.py`. `Settings` holds types and
defaults, in the order of that table.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

from localchat.config.parameters import PARAMETERS
from localchat.errors import UsageError
from localchat.suggestions import did_you_mean

_MOST: Final = 2**31 - 1
"""Of a whole number: what the engine's and llama.cpp's fields hold."""
_Count = Annotated[int, Meta(ge=1, le=_MOST)]
_Whole = Annotated[int, Meta(ge=0, le=_MOST)]
_Gigabytes = Annotated[float, Meta(gt=0, le=1_000_000)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings with type and default. None: the program or the model decides."""

    model: Annotated[str, Meta(min_length=1)] | None = None
    system: str | None = None
    remote: Annotated[str, Meta(min_length=1)] | None = None
    backend: Annotated[str, Meta(min_length=1)] | None = None
    llamacpp_library: Annotated[str, Meta(min_length=1)] | None = None
    speculation: bool = True
    draft: Annotated[str, Meta(min_length=1)] | None = None
    context_length: _Count | None = None
    kv_cache_type: Literal["f16", "bf16", "fp8", "fp8_e4m3", "q8_0", "q4_0"] | None = None
    cache_ram_mib: _Whole | None = None
    cache_disk_gb: Annotated[float, Meta(ge=0, le=1_000_000)] = 10.0
    kv_gb: _Gigabytes | None = None
    vram_gb: _Gigabytes | None = None
    gpu_layers: _Whole | Literal["auto", "all"] = "auto"
    experts_on_cpu: _Whole | Literal["auto"] = "auto"
    require_gpu: bool = False
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    head_int8: bool = False
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
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_k: _Whole | None = None
    top_p: _Share | None = None
    min_p: _Share | None = None
    typical_p: _Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = {}
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    theme: Literal["auto", "dark", "light", "high-contrast", "ansi", "ansi-light"] = "auto"
    reduced_motion: bool = False
    color: bool = True
    stats: bool = False
    quiet: bool = False
    history: bool = True
    offline: bool = False
    attach: bool = True
    keep_alive: Annotated[int, Meta(ge=-1, le=_MOST)] = 300


_TOO_LARGE: Final = re.compile(r"Expected `int` <= (\d+)")
"""How msgspec says that a number is above its bound."""

SAMPLING_KEYS: Final = tuple(
    key
    for key, parameter in PARAMETERS.items()
    if parameter.label is not None and parameter.label.group == "Sampling"
)
"""Keys that are also fields of a request's `Sampling`."""
DEFAULT_SAMPLING: Final = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""Sampling of the engine where neither the user nor the maker of the model chose it."""
REMOVED: Final[Mapping[str, str]] = {
    "technical_metrics": "metrics always use TTFT, tok/s and KV cache",
    "metrics.terms": "metrics always use TTFT, tok/s and KV cache",
}
"""Settings and key actions of earlier releases, and why they are gone. A settings file may still have them."""


class Given(NamedTuple):
    """A value from outside, not yet checked."""

    value: object
    origin: str
    """Its source, a phrase that an error or `config show` can begin with."""


class Resolved(NamedTuple):
    """The settings in force."""

    settings: Settings
    origins: Mapping[str, str]
    """The source of every key; `default` where nothing set it."""


def variable(key: str) -> str:
    """The environment variable of a key."""
    return f"LOCALCHAT_{key.upper()}"


def check_key(key: str, where: str) -> None:
    """Raise UsageError, naming the nearest key, unless `key` is a setting."""
    if key in REMOVED:
        raise UsageError(f"{where}: the setting {key} was removed", hint=REMOVED[key])
    if key not in PARAMETERS:
        raise UsageError(
            f"{where}: there is no setting {key!r}", hint=did_you_mean(key, PARAMETERS)
        )


def find_key(word: str, where: str) -> str:
    """The key that a word names by its own name or its flag's: `ctx`, `kv-type`. Raises UsageError."""
    written = word.lower().removeprefix("--").replace("_", "-")
    for key, parameter in PARAMETERS.items():
        # The flag of a switch that is on by default turns it off: its word would mean the opposite.
        if parameter.flag == f"--{written}" and not written.startswith("no-"):
            return key
    key = written.replace("-", "_")
    check_key(key, where)
    return key


def convert(key: str, given: Given) -> object:
    """Convert a value to the type of its key.

    Text from a flag or the environment is read leniently ("12" is a number), values of a file are not. Raises
    UsageError naming origin, key, value and what is valid.
    """
    kind = _types()[key]
    value = _parsed(key, given.value)
    try:
        return msgspec.convert(value, kind, strict=not isinstance(value, str), str_keys=True)
    except msgspec.ValidationError as problem:
        texts = value if key == "stop" and isinstance(value, list) else [given.value]
        shown = ", ".join(map(repr, texts))[:80]
        # A flag names its key already.
        named = given.origin if given.origin.startswith("--") else f"{given.origin}: {key}"
        raise UsageError(f"{named} must be {_valid(key, problem)}, not {shown}") from problem


def _valid(key: str, problem: msgspec.ValidationError) -> str:
    """What a key takes; its bound, where that was exceeded and is not among these words."""
    bound = _TOO_LARGE.match(str(problem))
    valid = PARAMETERS[key].valid
    if bound is None or bound[1] in valid:
        return valid
    return f"at most {int(bound[1]):,}"


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Settings from the environment. An empty variable counts as not set."""
    return {
        key: Given(environ[variable(key)], variable(key))
        for key in PARAMETERS
        if environ.get(variable(key))
    }


def resolve(*layers: Mapping[str, Given]) -> Resolved:
    """Merge layers of settings, a later one over an earlier one. Raises UsageError."""
    values: dict[str, object] = {}
    origins = dict.fromkeys(PARAMETERS, "default")
    for layer in layers:
        for key, given in layer.items():
            values[key] = convert(key, given)
            origins[key] = given.origin
    return Resolved(msgspec.convert(values, Settings), origins)


def offline_reason(resolved: Resolved, environ: Mapping[str, str]) -> str:
    """Where offline is set: by a setting, or by a variable of the Hugging Face tools. Empty: nowhere."""
    if resolved.settings.offline:
        return resolved.origins["offline"]
    yes = ("1", "on", "true", "yes")
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if environ.get(name, "").lower() in yes), "")


@cache
def _types() -> dict[str, Any]:
    """The type of each key without None, which no source can state."""
    hints = get_type_hints(Settings, include_extras=True)
    return {key: _without_none(hint) for key, hint in hints.items()}


def _without_none(hint: Any) -> Any:  # noqa: ANN401 - a type expression has no type
    rest = [part for part in get_args(hint) if part is not type(None)]
    if type(None) in get_args(hint) and len(rest) == 1:
        return rest[0]
    return hint


def _in_its_spelling(kind: Any, value: object) -> object:  # noqa: ANN401 - a type expression has no type
    """Lower-case a value that is one of several words: Q8_0 becomes q8_0."""
    words = [one for part in (kind, *get_args(kind)) for one in get_args(part)]
    if not isinstance(value, str) or value.lower() not in (*words, *get_args(kind)):
        return value
    return value.lower()


def _parsed(key: str, value: object) -> object:
    """Parse text for the two keys that are not one word, as JSON or as one text; and `4k` as 4,096."""
    if isinstance(value, str) and key in ("context_length", "max_tokens", "think_budget"):
        return _tokens(value)
    if not isinstance(value, str) or key not in ("stop", "logit_bias"):
        return _in_its_spelling(_types()[key], value)
    try:
        parsed: object = msgspec.json.decode(value)
    except msgspec.DecodeError:
        parsed = value
    if key == "logit_bias":
        return parsed
    return parsed if isinstance(parsed, list) else [value]


def _tokens(text: str) -> str:
    """Tokens that are written in units of 1,024, as models name their contexts, in digits."""
    number = text[:-1]
    unit = text[-1:].lower()
    if unit != "k" or not number.replace(".", "", 1).isdecimal():
        return text
    return str(int(float(number) * 1024))
