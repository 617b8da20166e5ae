"""Why this backend, and where the layers go: one sentence, the same in `fit`, `show`, `--stats` and the UI."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from localchat.fit.plan import MemoryPlan

Kind: TypeAlias = Literal["gguf", "safetensors"]
_RUNNERS: Final = {"llamacpp": "llama.cpp", "cuda": "the CUDA backend"}
_KINDS: Final[dict[Kind, str]] = {"gguf": "a GGUF file", "safetensors": "a safetensors checkpoint"}


def runner_name(backend: str) -> str:
    """What people call the backend of this name."""
    return _RUNNERS.get(backend, backend)


def kind_name(kind: Kind) -> str:
    """`a GGUF file`, `a safetensors checkpoint`."""
    return _KINDS[kind]


def chosen_because(backend: str, kind: Kind, *, asked: bool, refusals: Iterable[str] = ()) -> str:
    """The first half of the sentence. `asked`: the user named the backend.
    `refusals`: what other backends said, where one would have been taken before."""
    if asked:
        return f"{runner_name(backend)} was asked for"
    others = "; ".join(refusal.rstrip(".") for refusal in refusals)
    return f"{kind_name(kind)} runs on {runner_name(backend)}{f' ({others})' if others else ''}"


def placed(why: str, plan: "MemoryPlan") -> str:
    """The whole sentence: `why` (chosen_because) and where the plan puts the layers."""
    # A name keeps its letters: llama.cpp.
    first = f"{why[:1].upper()}{why[1:]}" if why.startswith("a ") else why
    return f"{first}, {_place(plan)}." if why else ""


def _place(plan: "MemoryPlan") -> str:
    if not plan.gpu_layers:
        return "on the CPU"
    if plan.gpu_layers < plan.layers:
        return f"{plan.gpu_layers} of {plan.layers} layers on the GPU, the rest in RAM"
    if not plan.gpu_bytes:
        return "all layers on the GPU, which shares the RAM"
    return "all layers on the GPU"
