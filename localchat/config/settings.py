"""Settings and their sources: flag over environment over settings file over default.

A key has one name everywhere: `context_length` in the settings file (settings_file.py),
`LOCALCHAT_CONTEXT_LENGTH` in the environment, and its flag in `KEYS`. `Settings` holds types and defaults.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import Meta

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
    backend: Annotated[str, Meta(min_length=1)] | None = None
    llamacpp_library: Annotated[str, Meta(min_length=1)] | None = None
    remote: Annotated[str, Meta(min_length=1)] | None = None
    context_length: _Count | None = None
    kv_cache_type: Literal["f16", "bf16", "fp8", "fp8_e4m3", "q8_0", "q4_0"] | None = None
    cache_ram_mib: _Whole | None = None
    cache_disk_gb: Annotated[float, Meta(ge=0, le=1_000_000)] = 10.0
    gpu_layers: _Whole | Literal["auto", "all"] = "auto"
    experts_on_cpu: _Whole | Literal["auto"] = "auto"
    require_gpu: bool = False
    vram_gb: _Gigabytes | None = None
    kv_gb: _Gigabytes | None = None
    dummy_weights: bool = False
    head_int8: bool = False
    quantize: Literal["fp8", "int8", "int4"] | None = None
    anyway: bool = False
    window_only: bool = False
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    speculation: bool = True
    loop_guard: bool = True
    draft: Annotated[str, Meta(min_length=1)] | None = None
    keep_alive: Annotated[int, Meta(ge=-1, le=_MOST)] = 300
    attach: bool = True
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
    max_tokens: _Count | None = None
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(max_length=16)] = ()
    n: Annotated[int, Meta(ge=1, le=16)] = 1
    think: Literal["auto", "on", "off"] = "auto"
    think_budget: _Whole | None = None
    hide_reasoning: bool = False
    stats: bool = False
    quiet: bool = False
    color: bool = True
    offline: bool = False
    history: bool = True
    theme: Literal["auto", "dark", "light", "high-contrast", "ansi", "ansi-light"] = "auto"
    reduced_motion: bool = False


class Key(NamedTuple):
    """The words of one setting, and where the TUI shows it."""

    flag: str
    valid: str
    """Ends the sentence «it takes …»."""
    about: str
    reloads: bool = False
    """Among the parameters of a conversation, and a new value loads the model again."""


_YES_NO = "true or false"
_SHARE = "a number from 0 to 1"
_GB = "a number of gigabytes above 0, up to a million"
_PENALTY = "a number from -2 to 2"

KEYS: Final[Mapping[str, Key]] = {
    "model": Key("-m", "a name or the path of a GGUF file", "The model that answers."),
    "system": Key("-s", "text", "Instructions that come before the conversation."),
    "backend": Key("--backend", "the name of a backend that doctor lists", "What runs the model."),
    "llamacpp_library": Key(
        "--llamacpp-library",
        "the path of a libllama, native, llama-cpp-python or xllamacpp",
        "The library of llama.cpp; otherwise the first that doctor finds.",
    ),
    "remote": Key(
        "--remote",
        "a name under [remotes] of the settings file, or the address of a server",
        "An OpenAI-compatible server that answers instead of this machine.",
    ),
    "context_length": Key(
        "--ctx",
        "a whole number from 1, or thousands as 4k",
        "Tokens of context; otherwise the largest that fits.",
        reloads=True,
    ),
    "kv_cache_type": Key(
        "--kv-type",
        "f16, q8_0 or q4_0; bf16 or fp8 on CUDA",
        "How the KV cache is stored.",
        reloads=True,
    ),
    "cache_ram_mib": Key(
        "--cache-ram", "a whole number of MiB", "RAM for the KV cache of idle conversations."
    ),
    "cache_disk_gb": Key(
        "--cache-disk",
        "a number of gigabytes; 0 is off",
        "Disk space for the KV cache of conversations.",
    ),
    "gpu_layers": Key(
        "--gpu-layers", "auto, all or a whole number", "Layers computed on the GPU.", reloads=True
    ),
    "experts_on_cpu": Key(
        "--experts-on-cpu",
        "auto or a whole number",
        "Layers whose experts stay in RAM, the rest of them on the GPU (llama.cpp).",
        reloads=True,
    ),
    "require_gpu": Key("--require-gpu", _YES_NO, "Refuse to load rather than use the CPU alone."),
    "vram_gb": Key("--vram-gb", _GB, "Memory limit for a model on each GPU."),
    "kv_gb": Key("--kv-gb", _GB, "Memory limit for the KV cache."),
    "dummy_weights": Key(
        "--dummy-weights", _YES_NO, "Random weights: to measure speed without a model's files."
    ),
    "head_int8": Key(
        "--head-int8",
        _YES_NO,
        "Round the output head to 8 bits at the load: faster (CUDA backend).",
    ),
    "quantize": Key(
        "--quantize",
        "fp8, int8 or int4",
        "Round the layers of a bf16 checkpoint while it loads (CUDA backend).",
    ),
    "anyway": Key(
        "--anyway",
        _YES_NO,
        "Load even if the model may not fit in memory.",
        reloads=True,
    ),
    "window_only": Key(
        "--window-only",
        _YES_NO,
        "Layers with a sliding window keep only their window: less memory, fewer prompts reused.",
        reloads=True,
    ),
    "threads": Key(
        "--threads",
        "a whole number; 0 is every physical core",
        "Compute threads.",
        reloads=True,
    ),
    "speculation": Key("--no-speculation", _YES_NO, "Speculative decoding."),
    "loop_guard": Key("--no-loop-guard", _YES_NO, "End answers that repeat themselves."),
    "draft": Key(
        "--draft",
        "a name or a path",
        "Draft model for speculative decoding, of the same family.",
        reloads=True,
    ),
    "keep_alive": Key(
        "--keep-alive",
        "seconds; 0 is at once, -1 forever",
        "How long the server keeps a model that nobody uses.",
    ),
    "attach": Key("--no-attach", _YES_NO, "Use the models of a running server."),
    "temperature": Key("--temperature", "a number from 0 to 10", "Randomness; 0 is greedy."),
    "top_k": Key("--top-k", "a whole number; 0 is off", "Sample from the k most likely tokens."),
    "top_p": Key(
        "--top-p",
        _SHARE,
        "Sample from the most likely tokens whose probabilities add up to this; 1 is off.",
    ),
    "min_p": Key(
        "--min-p", _SHARE, "Drop tokens less likely than this share of the most likely one."
    ),
    "typical_p": Key("-o typical_p", _SHARE, "Keep tokens of typical information; 1 is off."),
    "repetition_penalty": Key("-o repetition_penalty", "a number above 0, up to 10", "1 is off."),
    "frequency_penalty": Key("-o frequency_penalty", _PENALTY, "Per earlier use; 0 is off."),
    "presence_penalty": Key("-o presence_penalty", _PENALTY, "Once for any earlier use; 0 is off."),
    "logit_bias": Key(
        "-o logit_bias",
        'token ids with numbers from -100 to 100, as {"42": -5}',
        "Added to logits.",
    ),
    "seed": Key("--seed", "a whole number from 0", "Random seed, for reproducible output."),
    "max_tokens": Key(
        "--max-tokens", "a whole number from 1, or thousands as 2k", "Longest answer, in tokens."
    ),
    "stop": Key(
        "--stop", "text that is not empty, 16 at most", "The answer ends before this text."
    ),
    "n": Key("--n", "a whole number from 1 to 16", "How many answers."),
    "think": Key("--think", "auto, on or off", "Whether the model reasons before it answers."),
    "think_budget": Key(
        "--think-budget",
        "a whole number from 0, or thousands as 2k",
        "Longest reasoning, in tokens.",
    ),
    "hide_reasoning": Key("--hide-reasoning", _YES_NO, "Do not show the reasoning."),
    "stats": Key("--stats", _YES_NO, "One line of metrics after the answer."),
    "quiet": Key("-q", _YES_NO, "Print nothing on stderr but errors and what was asked for."),
    "color": Key("--no-color", _YES_NO, "Colours on a terminal."),
    "offline": Key("--offline", _YES_NO, "Never use the network."),
    "history": Key("--no-history", _YES_NO, "Keep conversations on this machine's disk."),
    "theme": Key(
        "--theme",
        "auto, dark, light, high-contrast, ansi or ansi-light",
        "Colours of the screen: auto is dark or light as the terminal; ansi ones are its own.",
    ),
    "reduced_motion": Key("--reduced-motion", _YES_NO, "Nothing moves or blinks on the screen."),
}

_TOO_LARGE: Final = re.compile(r"Expected `int` <= (\d+)")
"""How msgspec says that a number is above its bound."""

SAMPLING_KEYS: Final = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "seed"),
)
"""Keys that are also fields of a request's `Sampling`."""


DEFAULT_SAMPLING: Final = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""Sampling of the engine where neither the user nor the maker of the model chose it."""
REMOVED: Final[Mapping[str, str]] = {
    "technical_metrics": "metrics always use TTFT, tok/s and KV cache",
    "metrics.terms": "metrics always use TTFT, tok/s and KV cache",
}
"""Settings and key actions of earlier releases, and why they are gone. A settings file may still have them."""

UNSET: Final = {
    **dict.fromkeys(("top_k", "typical_p", "repetition_penalty"), "off"),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), "off"),
    **dict.fromkeys(("system", "remote", "draft"), "none"),
    "quantize": "as stored",
    "model": "the one used last",
    "backend": "the one that can run the model",
    "llamacpp_library": "the first that doctor lists",
    "context_length": "the largest that fits",
    "kv_cache_type": "f16, or what fits",
    "cache_ram_mib": "half of the free memory, at most 2 GB",
    "vram_gb": "no limit",
    "kv_gb": "no limit",
    "seed": "another one for each answer",
    "max_tokens": "until the model stops or the context is full",
    "think": "as the model decides",
    "think_budget": "no limit",
}
"""What happens where a setting has no value."""


SERVER_KEYS: Final = ("keep_alive",)
"""Keys whose flags only `localchat serve` has."""


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
    if key not in KEYS:
        raise UsageError(f"{where}: there is no setting {key!r}", hint=did_you_mean(key, KEYS))


def find_key(word: str, where: str) -> str:
    """The key that a word names by its own name or its flag's: `ctx`, `kv-type`. Raises UsageError."""
    written = word.lower().removeprefix("--").replace("_", "-")
    for key, words in KEYS.items():
        # The flag of a switch that is on by default turns it off: its word would mean the opposite.
        if words.flag == f"--{written}" and not written.startswith("no-"):
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
    valid = KEYS[key].valid
    if bound is None or bound[1] in valid:
        return valid
    return f"at most {int(bound[1]):,}"


def from_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """Settings from the environment. An empty variable counts as not set."""
    return {
        key: Given(environ[variable(key)], variable(key))
        for key in KEYS
        if environ.get(variable(key))
    }


def resolve(*layers: Mapping[str, Given]) -> Resolved:
    """Merge layers of settings, a later one over an earlier one. Raises UsageError."""
    values: dict[str, object] = {}
    origins = dict.fromkeys(KEYS, "default")
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
