"""What an answer consists of, as its parsers give it."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Answer:
    """A piece of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A piece of a tool call. The first piece of call `number` has its `id` and `name`; the `arguments` of all
    its pieces together are JSON text."""

    number: int
    id: str = ""
    name: str = ""
    arguments: str = ""


Part: TypeAlias = Answer | Thought | Call


class Parser(Protocol):
    """Turns streamed text into parts. One for each choice; never raises."""

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain now; pieces are never empty."""
        ...

    def finish(self) -> list[Part]:
        """What was held back, at the end of the answer."""
        ...
