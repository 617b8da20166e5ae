"""Formats memory plans and backend choices as sentences. Nothing here prints."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from localchat.units import counted, size, tokens

if TYPE_CHECKING:
    from localchat.fit.memory_plan import MemoryPlan

USUAL_LENGTH: Final = 4096
"""Tokens of the conversation for which reports state the capacity of a KV cache."""
_MIN_SHOWN_MAPPED_BYTES: Final = 10**9


def parts(plan: "MemoryPlan") -> str:
    """Return one sentence with the sizes of a load that lacks something besides memory."""
    return f"It would take {size(plan.total_bytes)}: {_shares(plan)}."


def _shares(plan: "MemoryPlan") -> str:
    unpacked = ""
    if plan.unpacked_bytes:
        unpacked = f" ({size(plan.unpacked_bytes)} of it unpacked)"
    return (
        f"weights {size(plan.weights_bytes)}{unpacked} · KV {size(plan.kv_bytes)} ({plan.kv_type}) · "
        f"compute {size(plan.compute_bytes)} · overhead {size(plan.overhead_bytes)}"
    )


def room(kv_tokens: int, context_tokens: int) -> str:
    """Return a sentence on how many conversations fit into a KV cache. Empty if unknown."""
    if kv_tokens < 1 or context_tokens < 1:
        return ""
    capacities = []
    for length in sorted({min(USUAL_LENGTH, context_tokens), context_tokens}):
        if count := kv_tokens // length:
            capacities.append(f"{counted(count, 'conversation')} of {tokens(length)}")
    if capacities:
        return f"Its KV cache has room for {' or '.join(capacities)}."
    return ""


def verdict(plan: "MemoryPlan") -> tuple[str, ...]:
    """Return the plan in a few lines: whether it fits, its parts, and what would help."""
    # memory_plan probes the hardware, and screens import this module before their first frame.
    from localchat.fit.memory_plan import all_advice

    if plan.missing:
        first_word = "Does not fit"
        if plan.fits:
            first_word = "Fits"
        return (f"{first_word}: {plan.missing}", "", *plan.notes, *plan.advice)
    needed = size(plan.total_bytes)
    free = size(plan.free_bytes)
    if plan.fits:
        first = f"Fits: needs {needed} of the {free} that are free"
    else:
        first = f"Does not fit: needs {needed}, and {free} are free"
    lines = [f"{first}, with a context of {tokens(plan.context_tokens)}.", _shares(plan)]
    if plan.gpu_layers:
        memory = "unified memory"
        if plan.gpu_bytes:
            memory = f"{size(plan.gpu_bytes)} of {size(plan.gpu_free_bytes)} free"
        lines.append(f"GPU: {plan.gpu_layers} of {plan.layers} layers, {memory}.")
    if plan.fits:
        lines += _room_lines(plan)
    return (*lines, *plan.notes, *all_advice(plan))


def _room_lines(plan: "MemoryPlan") -> list[str]:
    """Return further facts about the memory of a load that fits."""
    lines = []
    if plan.mapped_bytes >= _MIN_SHOWN_MAPPED_BYTES:
        lines.append(
            f"Task managers may show {size(plan.mapped_bytes)} more: cached pages of the file, which the "
            "system can drop."
        )
    if plan.max_context_tokens > plan.context_tokens:
        lines.append(f"Up to {tokens(plan.max_context_tokens)} of context would fit.")
    if room_sentence := room(plan.kv_tokens, plan.context_tokens):
        lines.append(room_sentence)
    return lines


# `fit`, `show`, `--stats` and the screen all show the same sentence.

Kind: TypeAlias = Literal["gguf", "safetensors"]
_RUNNERS: Final = {"llamacpp": "llama.cpp", "cuda": "the CUDA backend"}
_KINDS: Final[dict[Kind, str]] = {"gguf": "a GGUF file", "safetensors": "a safetensors checkpoint"}


def runner_name(backend: str) -> str:
    """Return the name that people use for a backend."""
    return _RUNNERS.get(backend, backend)


def kind_name(kind: Kind) -> str:
    """Return `a GGUF file` or `a safetensors checkpoint`."""
    return _KINDS[kind]


def chosen_because(
    backend: str, kind: Kind, *, is_requested: bool, refusals: Iterable[str] = ()
) -> str:
    """Return the first half of the sentence on the choice of a backend.

    is_requested: the user named the backend. refusals: reasons of backends that would have gone first.
    """
    if is_requested:
        return f"{runner_name(backend)} was asked for"
    others = "; ".join(refusal.rstrip(".") for refusal in refusals)
    return f"{kind_name(kind)} runs on {runner_name(backend)}{f' ({others})' if others else ''}"


def placed(why: str, plan: "MemoryPlan") -> str:
    """Return the whole sentence: `why` (from chosen_because), and the memory that holds the layers."""
    if not why:
        return ""
    # A name keeps its case: llama.cpp.
    if why.startswith("a "):
        why = f"A{why[1:]}"
    return f"{why}, {_placement(plan)}."


def _placement(plan: "MemoryPlan") -> str:
    if not plan.gpu_layers:
        return "on the CPU"
    if plan.gpu_layers < plan.layers:
        return f"{plan.gpu_layers} of {plan.layers} layers on the GPU, the rest in RAM"
    if plan.experts_on_cpu:
        return f"all layers on the GPU, the experts of {plan.experts_on_cpu} in RAM"
    if not plan.gpu_bytes:
        return "all layers on the GPU, which shares the RAM"
    return "all layers on the GPU"
