"""Steps that make room for a load or a prompt: nine, in order, each with what it gives here.

The order is that of the loss to the user: an input can be cut for nothing, a smaller model answers worse.
load_steps.py finds those of a load, chat/prompt_steps.py those of a prompt. Imports no planner.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, TypeAlias

import msgspec

from localchat.units import size, tokens

StepName: TypeAlias = Literal[
    "shorter_input",
    "prefix_reuse",
    "chunked_prefill",
    "kv_type",
    "context",
    "gpu_layers",
    "slots",
    "quantization",
    "model",
]
TITLES: Final[dict[StepName, str]] = {
    "shorter_input": "shorter input",
    "prefix_reuse": "prefix reuse",
    "chunked_prefill": "chunked prefill",
    "kv_type": "KV type",
    "context": "context",
    "gpu_layers": "layers on the GPU",
    "slots": "fewer slots",
    "quantization": "smaller quantization",
    "model": "smaller model",
}

IN_ORDER: Final = "What makes room, in order of what it costs you:"


class MemoryStep(msgspec.Struct, frozen=True):
    """One step towards a load or a prompt that fits."""

    name: StepName
    change: str
    """What it changes; of a step that gives nothing here, why."""
    gained_bytes: int = 0
    """Memory that it makes free."""
    gained_tokens: int = 0
    """Room for a prompt that it makes."""
    suffices: bool = False
    """Whether it is enough by itself."""
    flag: str = ""
    """Flags, or the command, that take it."""
    settings: tuple[tuple[str, str], ...] = ()
    """The same as settings: keys and values."""
    model: str = ""
    """A model to use instead."""

    @property
    def helps(self) -> bool:
        """Whether it gives anything here."""
        return self.suffices or self.gained_bytes > 0 or self.gained_tokens > 0

    @property
    def can_be_taken(self) -> bool:
        """Whether the program can take it; the others are the user's."""
        return self.helps and bool(self.settings or self.model)

    @property
    def is_here(self) -> bool:
        """Whether its model need not be downloaded."""
        return self.flag.startswith("-m ")

    @property
    def title(self) -> str:
        """Its name for people."""
        return TITLES[self.name]

    @property
    def gain(self) -> str:
        """`gives 1.2 GB, enough`."""
        parts = [size(self.gained_bytes)] if self.gained_bytes > 0 else []
        parts += [f"room for {tokens(self.gained_tokens)}"] if self.gained_tokens > 0 else []
        verdict = "enough" if self.suffices else "not enough alone"
        if not self.helps:
            return "gives nothing here"
        if parts:
            return f"gives {' and '.join(parts)}, {verdict}"
        return verdict

    def sentence(self, *, with_flag: bool = True) -> str:
        """The step in one line."""
        flag = f" ({self.flag})" if with_flag and self.flag and self.helps else ""
        return f"{self.title}: {self.change}; {self.gain}{flag}"

    def as_json(self) -> dict[str, Any]:
        """The fields of `--json` and of the endpoint."""
        return {
            "step": self.name,
            "change": self.change,
            "gained_bytes": self.gained_bytes,
            "gained_tokens": self.gained_tokens,
            "suffices": self.suffices,
            "flag": self.flag or None,
            "settings": dict(self.settings),
            "model": self.model or None,
        }


def numbered(steps: Iterable[MemoryStep]) -> Iterator[tuple[int, MemoryStep]]:
    """The steps that give anything, from 1."""
    return enumerate((step for step in steps if step.helps), 1)


def step_lines(steps: tuple[MemoryStep, ...]) -> Iterator[str]:
    """Yield the steps that help, in order with their numbers. `as_json` has the others too."""
    for number, step in numbered(steps):
        yield f"{number}. {step.sentence()}"
