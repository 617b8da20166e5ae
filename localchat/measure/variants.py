"""Variants of a benchmark from the words of the command line: models, and settings beside each other."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Final

from localchat.config.settings import KEYS, Given, convert
from localchat.errors import UsageError
from localchat.measure.sweep import BenchVariant
from localchat.suggestions import did_you_mean

PARALLEL: Final = "parallel"
"""A key beside those of the settings: requests that the server computes at once."""
_LOAD_KEYS: Final = (
    *("backend", "llamacpp_library", "context_length", "kv_cache_type", "cache_ram_mib"),
    *("gpu_layers", "experts_on_cpu", "vram_gb", "kv_gb", "threads", "speculation"),
    *("head_int8", "dummy_weights", "quantize", "draft"),
)
"""Settings that change how a model is loaded or runs."""
_ON_OFF: Final = {"on": "true", "off": "false"}
_MOST_PARALLEL: Final = 255


def variants(
    models: Sequence[str], varied: Mapping[str, Sequence[str]], parallel: int | None
) -> tuple[BenchVariant, ...]:
    """Every model with every combination of values. varied: of `parse_vary`, over all models.

    Raises UsageError for the same model twice, and for settings of a server that already runs."""
    if varied and (running := next((word for word in models if is_running(word)), None)):
        raise UsageError(
            f"--vary cannot change the settings of {running}, which runs already",
            hint="name a model of this machine: each of its variants gets a server of its own",
        )
    found = []
    for model in models:
        for values in product(*varied.values()):
            settings = dict(zip(varied, values, strict=True))
            slots = int(settings.pop(PARALLEL)) if PARALLEL in settings else parallel
            words = [model] if len(models) > 1 or not varied else []
            words += [
                f"{flag_word(key)}={value}" for key, value in zip(varied, values, strict=True)
            ]
            found.append(BenchVariant(" ".join(words), model, settings, slots))
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{twice} is named twice", hint="name each model and each value once")
    return tuple(found)


def is_running(word: str) -> bool:
    """Whether a word means a server that runs already, not a model of this machine."""
    return word.startswith("remote:") or "://" in word


def parse_vary(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Values to try, by the key of the setting: of `kv-type=f16,q8_0`. Raises UsageError."""
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        key = setting_key(name.strip())
        if key is None:
            known = [flag_word(one) for one in (*_LOAD_KEYS, PARALLEL)]
            raise UsageError(
                f"--vary: there is no setting {name!r} of a load",
                hint=did_you_mean(name, known) or f"use one of {', '.join(known)}",
            )
        texts = tuple(_ON_OFF.get(text.strip().lower(), text.strip()) for text in values.split(","))
        if not equals or not all(texts) or len(texts) < 2:
            raise UsageError(
                f"--vary {word}: it needs at least two values",
                hint=f"as in --vary {flag_word(key)}=A,B",
            )
        for text in texts:
            _check(key, text)
        found[key] = texts
    return found


def setting_key(name: str) -> str | None:
    """The key of a setting by its own name or its flag's; None for none of a load."""
    written = name.lower().removeprefix("--")
    for key in (*_LOAD_KEYS, PARALLEL):
        if written.replace("-", "_") == key or written == flag_word(key):
            return key
    return None


def flag_word(key: str) -> str:
    """The name of a setting as its flag has it: `kv-type` for kv_cache_type."""
    if key in KEYS:
        return KEYS[key].flag.removeprefix("--").removeprefix("no-")
    return key


def _check(key: str, text: str) -> None:
    if key != PARALLEL:
        convert(key, Given(text, f"--vary {flag_word(key)}"))
    elif not (text.isascii() and text.isdecimal() and 1 <= int(text) <= _MOST_PARALLEL):
        raise UsageError(f"--vary parallel must be a whole number from 1 to 255, not {text!r}")
