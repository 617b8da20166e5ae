"""Memory cost of parameter values, planned from the model's header."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec.structs import replace

from localchat.errors import LocalchatError
from localchat.fit.kv_types import FP8
from localchat.fit.load_options import LoadOptions
from localchat.session.context import ModelSetup, SessionContext
from localchat.units import size, tokens

_MIB: Final = 2**20
_CONTEXTS: Final = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
_KV_TYPES: Final = ("f16", "q8_0", "q4_0")
"""KV types to offer if the backend does not name any."""


class Cost(NamedTuple):
    """A value of a parameter and its cost in words."""

    value: str
    words: str
    fits: bool = True
    now: bool = False
    """Whether it is the current value."""


def parameter_costs(key: str, context: SessionContext, setup: ModelSetup) -> tuple[Cost, ...]:
    """Usual values of a parameter that changes memory use, each with its cost.

    Blocks for some milliseconds. Raises LocalchatError if the model's header cannot be read.
    """
    return tuple(_costs(key, context, setup))


def _costs(key: str, context: SessionContext, setup: ModelSetup) -> Iterator[Cost]:
    options = setup.options.load
    now = context.plan(setup, options)
    match key:
        case "context_length":
            limit = max(now.max_context_tokens, now.context_tokens)
            for count in sorted({*(n for n in _CONTEXTS if n <= 2 * limit), now.context_tokens}):
                yield _cost(context, setup, replace(options, context_tokens=count), str(count), now)
        case "kv_cache_type":
            for name in _kv_types(now.kv_types):
                yield _cost(context, setup, replace(options, kv_type=name), name, now)
        case "gpu_layers":
            values = [0, now.layers // 2, now.layers] if now.gpu_free_bytes else [0]
            for count in dict.fromkeys(values):
                yield _cost(context, setup, replace(options, gpu_layers=count), str(count), now)
        case _:
            return


def _kv_types(known: tuple[str, ...]) -> tuple[str, ...]:
    """The usual KV types that the backend supports."""
    plain = "bf16" if known and "f16" not in known else "f16"
    usual = (plain, FP8, "q8_0", "q4_0")
    return tuple(name for name in usual if name in known) or _KV_TYPES


def _cost(
    context: SessionContext, setup: ModelSetup, options: LoadOptions, value: str, now: object
) -> Cost:
    try:
        plan = context.plan(setup, options)
    except LocalchatError as problem:
        return Cost(value, problem.message, fits=False)
    words = f"{size(plan.total_bytes)} of {size(plan.free_bytes)} free, KV {size(plan.kv_bytes)}"
    if options.kv_type is not None:
        words += f", room for {tokens(plan.max_context_tokens)}"
    return Cost(value, words if plan.fits else f"does not fit: {words}", plan.fits, plan == now)
