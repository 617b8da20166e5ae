"""Variants to measure side by side: models, and settings of one model."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Final

import msgspec

from localchat.config.parameters import PARAMETERS
from localchat.config.settings import Given, convert
from localchat.errors import UsageError
from localchat.suggestions import did_you_mean

PARALLEL: Final = "parallel"
"""Key for the requests that a server computes at once, which is not a setting."""
_SAME_SPEED: Final = ("cache_disk_gb", "require_gpu", "anyway")
"""Settings of a load that change neither speed nor answers."""
_LOAD_KEYS: Final = tuple(
    key for key, parameter in PARAMETERS.items() if parameter.loads and key not in _SAME_SPEED
)
"""Settings that change how a model is loaded or runs."""
_ON_OFF: Final = {"on": "true", "off": "false"}
_MAX_PARALLEL: Final = 255


class BenchVariant(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model with settings, measured beside others."""

    name: str
    """Unique name within the measurement."""
    model: str
    """Name of the model as the user wrote it, or the address of a server."""
    settings: dict[str, str] = {}
    """Values by key, which override the settings file."""
    parallel: int | None = None
    """Requests that its server computes at once."""


def variants(
    models: Sequence[str], varied: Mapping[str, Sequence[str]], parallel: int | None
) -> tuple[BenchVariant, ...]:
    """Combine every model with every combination of `varied`, which `parse_vary` returns.

    Raises UsageError if a variant appears twice, or if settings of a running server would vary.
    """
    if varied and (running := next(filter(is_running, models), None)):
        raise UsageError(
            f"--vary cannot change the settings of {running}, which runs already",
            hint="name a model of this machine: each of its variants gets a server of its own",
        )
    combinations = []
    for model in models:
        for values in product(*varied.values()):
            settings = dict(zip(varied, values, strict=True))
            names = [f"{flag_name(key)}={value}" for key, value in settings.items()]
            if len(models) > 1 or not varied:
                names.insert(0, model)
            slots = int(settings.pop(PARALLEL)) if PARALLEL in settings else parallel
            combinations.append(BenchVariant(" ".join(names), model, settings, slots))
    all_names = [variant.name for variant in combinations]
    if duplicate := next((name for name in all_names if all_names.count(name) > 1), None):
        raise UsageError(
            f"{duplicate} is named twice", hint="name each model and each value only once"
        )
    return tuple(combinations)


def is_running(model: str) -> bool:
    """Return True if the name means a running server, not a model."""
    return model.startswith("remote:") or "://" in model


def parse_vary(arguments: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Parse values of `--vary`, such as `kv-type=f16,q8_0`, by key. Raises UsageError."""
    varied: dict[str, tuple[str, ...]] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        key = setting_key(name.strip())
        if key is None:
            names = [flag_name(key) for key in (*_LOAD_KEYS, PARALLEL)]
            raise UsageError(
                f"--vary: {name!r} is not a setting of a load",
                hint=did_you_mean(name, names) or f"use one of {', '.join(names)}",
            )
        values = tuple(
            _ON_OFF.get(value.strip().lower(), value.strip()) for value in text.split(",")
        )
        if not equals or not all(values) or len(values) < 2:
            raise UsageError(
                f"--vary {argument}: expected two values or more",
                hint=f"as in --vary {flag_name(key)}=A,B",
            )
        for value in values:
            _check(key, value)
        varied[key] = values
    return varied


def setting_key(name: str) -> str | None:
    """Return the key of a name or flag; None if it is not a load setting."""
    written = name.lower().removeprefix("--")
    for key in (*_LOAD_KEYS, PARALLEL):
        if written.replace("-", "_") == key or written == flag_name(key):
            return key
    return None


def flag_name(key: str) -> str:
    """Return the name of a key's flag without dashes: `kv-type` for kv_cache_type."""
    if key in PARAMETERS:
        return PARAMETERS[key].flag.removeprefix("--").removeprefix("no-")
    return key


def setting_text(value: object) -> str:
    """Write the value of a setting as a flag takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return msgspec.json.encode(value).decode()
    return str(value)


def _check(key: str, value: str) -> None:
    if key != PARALLEL:
        convert(key, Given(value, f"--vary {flag_name(key)}"))
    elif not (value.isascii() and value.isdecimal() and 1 <= int(value) <= _MAX_PARALLEL):
        raise UsageError(
            f"--vary parallel must be a whole number from 1 to {_MAX_PARALLEL}, not {value!r}"
        )
