"""Memory cost of parameter values, planned from the model's header."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from localchat.errors import LocalchatError
from localchat.fit.kv_types import FP8
from localchat.fit.load_options import LoadOptions
from localchat.session.context import ModelSetup, SessionContext
from localchat.units import size, tokens

if TYPE_CHECKING:
    from localchat.fit.memory_plan import MemoryPlan

_CONTEXTS: Final = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
_KV_TYPES: Final = ("f16", "q8_0", "q4_0")
"""KV types to offer if the backend does not name any."""


class Cost(NamedTuple):
    """A value of a parameter and its cost."""

    value: str
    words: str
    """The cost as a phrase, or the error of the plan."""
    fits: bool = True
    is_current: bool = False


def parameter_costs(key: str, context: SessionContext, setup: ModelSetup) -> tuple[Cost, ...]:
    """Return the usual values of a parameter that changes memory use, each with its cost.

    Blocks for some milliseconds. Raises LocalchatError if the model's header cannot be read.
    """
    return tuple(_costs(key, context, setup))


def _costs(key: str, context: SessionContext, setup: ModelSetup) -> Iterator[Cost]:
    options = setup.options.load
    current = context.plan(setup, options)
    changed: dict[str, LoadOptions] = {}
    match key:
        case "context_length":
            limit = max(current.max_context_tokens, current.context_tokens)
            counts = {count for count in _CONTEXTS if count <= 2 * limit}
            for count in sorted(counts | {current.context_tokens}):
                changed[str(count)] = replace(options, context_tokens=count)
        case "kv_cache_type":
            for name in _kv_types(current.kv_types):
                changed[name] = replace(options, kv_type=name)
        case "gpu_layers":
            layers = [0]
            if current.gpu_free_bytes:
                layers += [current.layers // 2, current.layers]
            for count in layers:
                changed[str(count)] = replace(options, gpu_layers=count)
        case _:
            return
    for value, load in changed.items():
        yield _cost(context, setup, value, load, current)


def _kv_types(supported: tuple[str, ...]) -> tuple[str, ...]:
    """Return the usual KV types that the backend supports."""
    plain = "f16"
    if supported and "f16" not in supported:
        plain = "bf16"
    usual = (plain, FP8, "q8_0", "q4_0")
    return tuple(name for name in usual if name in supported) or _KV_TYPES


def _cost(
    context: SessionContext,
    setup: ModelSetup,
    value: str,
    options: LoadOptions,
    current: "MemoryPlan",
) -> Cost:
    try:
        plan = context.plan(setup, options)
    except LocalchatError as problem:
        return Cost(value, problem.message, fits=False)
    needed = size(plan.total_bytes)
    free = size(plan.free_bytes)
    if plan.fits:
        words = f"needs {needed} of the {free} free"
    else:
        words = f"does not fit: needs {needed}, {free} free"
    words += f", KV {size(plan.kv_bytes)}"
    if options.kv_type is not None:
        words += f", room for {tokens(plan.max_context_tokens)}"
    return Cost(value, words, plan.fits, plan == current)
