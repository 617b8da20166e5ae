"""Sentences and bars for a memory plan, and for the choice of a backend. Nothing here prints."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from localchat.units import size, tokens

if TYPE_CHECKING:
    from localchat.fit.memory_plan import MemoryPlan


_SIGNS = (
    ("█", "weights"),
    ("▓", "KV"),
    ("▒", "compute"),
    ("░", "overhead"),
    ("╱", "other processes"),
)
_KEPT = "-"
_FREE = "·"


def bar(
    plan: "MemoryPlan", memory_bytes: int, others_bytes: int, width: int = 60
) -> tuple[str, ...]:
    """A bar of `width` cells for the memory that bounds a plan, and the legend of its signs.

    Where the plan does not fit, `|` marks the end of the memory. memory_bytes: all of it; others_bytes:
    already taken.
    """
    parts = (
        *(plan.weights_bytes, plan.kv_bytes, plan.compute_bytes, plan.overhead_bytes),
        others_bytes,
    )
    kept = max(memory_bytes - others_bytes - plan.free_bytes, 0)
    free = max(plan.free_bytes - plan.total_bytes, 0)
    signs = (*(sign for sign, _ in _SIGNS), _KEPT, _FREE)
    cells = _cells(tuple(zip(signs, (*parts, kept, free), strict=True)), width)
    if plan.total_bytes > plan.free_bytes:
        total = sum((*parts, kept))
        end = min(width * memory_bytes // max(total, 1), width - 1)
        cells = f"{cells[:end]}|{cells[end:]}"
    legend = [
        f"{sign} {name} {size(part)}" for (sign, name), part in zip(_SIGNS, parts, strict=True)
    ]
    legend += [f"{_KEPT} reserved {size(kept)}", f"{_FREE} free {size(free)}"]
    return (f"[{cells}] {size(memory_bytes)}", ", ".join(legend[:4]), ", ".join(legend[4:]))


def _cells(parts: tuple[tuple[str, int], ...], width: int) -> str:
    """`width` cells shared in proportion, by rounding the running sum, so that nothing is lost."""
    total = max(sum(count for _, count in parts), 1)
    done = 0
    text = ""
    for sign, count in parts:
        done += count
        text += sign * (round(width * done / total) - len(text))
    return text


def parts(plan: "MemoryPlan") -> str:
    """One sentence with the sizes of a load that lacks something besides memory."""
    return f"It would take {size(plan.total_bytes)}: {_shares(plan)}."


def _shares(plan: "MemoryPlan") -> str:
    copied = f" ({size(plan.unpacked_bytes)} of it unpacked)" if plan.unpacked_bytes else ""
    return (
        f"weights {size(plan.weights_bytes)}{copied} · KV {size(plan.kv_bytes)} ({plan.kv_type}) · "
        f"compute {size(plan.compute_bytes)} · overhead {size(plan.overhead_bytes)}"
    )


USUAL_LENGTH: Final = 4096
"""Tokens of a conversation that capacity is told for."""


def room(kv_tokens: int, context_tokens: int) -> str:
    """How many conversations fit into a KV cache at once, a sentence; empty where it is unknown."""
    lengths = sorted({min(USUAL_LENGTH, context_tokens), context_tokens})
    if kv_tokens < 1 or context_tokens < 1:
        return ""
    capacities = [
        f"{count:,} {'conversation' if count == 1 else 'conversations'} of {tokens(length)}"
        for length in lengths
        if (count := kv_tokens // length)
    ]
    if capacities:
        return f"Its KV cache holds {' or '.join(capacities)} at once."
    return ""


_SHOWN_MAPPED_BYTES = 10**9


def verdict(plan: "MemoryPlan") -> tuple[str, ...]:
    """The plan in a few lines: whether it fits, its parts, and what would help."""
    from localchat.fit.memory_plan import all_advice  # and with it the probe of the hardware

    if plan.missing:
        first_word = "Fits" if plan.fits else "Does not fit"
        return (f"{first_word}: {plan.missing}", "", *plan.notes, *plan.advice)
    needed = size(plan.total_bytes)
    free = size(plan.free_bytes)
    if plan.fits:
        first = f"Fits: needs {needed} of the {free} that are free"
    else:
        first = f"Does not fit: needs {needed}, and {free} are free"
    lines = [f"{first}, with a context of {tokens(plan.context_tokens)}.", _shares(plan)]
    if plan.gpu_layers:
        where = (
            f"{size(plan.gpu_bytes)} of {size(plan.gpu_free_bytes)} free"
            if plan.gpu_bytes
            else "unified memory"
        )
        lines.append(f"GPU: {plan.gpu_layers} of {plan.layers} layers, {where}.")
    if plan.fits and plan.mapped_bytes >= _SHOWN_MAPPED_BYTES:
        lines.append(
            f"Task managers may show {size(plan.mapped_bytes)} more: cached pages of the file, which the "
            "system can drop."
        )
    if plan.fits and plan.max_context_tokens > plan.context_tokens:
        lines.append(f"Up to {tokens(plan.max_context_tokens)} of context would fit.")
    if plan.fits and (room_sentence := room(plan.kv_tokens, plan.context_tokens)):
        lines.append(room_sentence)
    return (*lines, *plan.notes, *all_advice(plan))


# ---------------------------------------------------------------------------- choice of a backend
# One sentence, the same in `fit`, `show`, `--stats` and the UI.

Kind: TypeAlias = Literal["gguf", "safetensors"]
_RUNNERS: Final = {"llamacpp": "llama.cpp", "cuda": "the CUDA backend"}
_KINDS: Final[dict[Kind, str]] = {"gguf": "a GGUF file", "safetensors": "a safetensors checkpoint"}


def runner_name(backend: str) -> str:
    """The name that people use for a backend."""
    return _RUNNERS.get(backend, backend)


def kind_name(kind: Kind) -> str:
    """`a GGUF file`, `a safetensors checkpoint`."""
    return _KINDS[kind]


def chosen_because(backend: str, kind: Kind, *, asked: bool, refusals: Iterable[str] = ()) -> str:
    """First half of the sentence on a choice of backend. asked: the user named the backend.

    refusals: reasons of backends that would have gone first.
    """
    if asked:
        return f"{runner_name(backend)} was asked for"
    others = "; ".join(refusal.rstrip(".") for refusal in refusals)
    return f"{kind_name(kind)} runs on {runner_name(backend)}{f' ({others})' if others else ''}"


def placed(why: str, plan: "MemoryPlan") -> str:
    """The whole sentence: `why` (from chosen_because) and where the plan puts the layers."""
    # A name keeps its letters: llama.cpp.
    first = f"{why[:1].upper()}{why[1:]}" if why.startswith("a ") else why
    return f"{first}, {_place(plan)}." if why else ""


def _place(plan: "MemoryPlan") -> str:
    if not plan.gpu_layers:
        return "on the CPU"
    if plan.gpu_layers < plan.layers:
        return f"{plan.gpu_layers} of {plan.layers} layers on the GPU, the rest in RAM"
    if plan.experts_on_cpu:
        return f"all layers on the GPU, the experts of {plan.experts_on_cpu} in RAM"
    if not plan.gpu_bytes:
        return "all layers on the GPU, which shares the RAM"
    return "all layers on the GPU"
