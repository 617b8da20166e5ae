"""What an answer consists of, as its parsers give it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias


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


# What a chat format makes of a conversation.


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt, and what belongs to it.

    text: to be tokenized with control tokens recognised. add_bos: whether the tokenizer shall put
    its own first token before it (a template writes its own). opens_reasoning: the prompt ends
    inside a block of reasoning, so the answer begins there. may_reason: the answer may begin with
    such a block. stop: strings that end the answer. warnings: sentences for the user. tools: what
    the model was told it may call.
    """

    text: str
    add_bos: bool = False
    opens_reasoning: bool = False
    may_reason: bool = False
    stop: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


# Where tags stand in a text that arrives in pieces.


def find_first(text: str, tags: Iterable[str]) -> tuple[int, str]:
    """The earliest tag, the longest where two begin together; (0, "") where there is none."""
    found = [(at, -len(tag), tag) for tag in tags if (at := text.find(tag)) >= 0]
    if not found:
        return 0, ""
    at, _, tag = min(found)
    return at, tag


def partial_tag_start(text: str, tags: tuple[str, ...]) -> int:
    """Where the beginning of a tag stands at the end of the text; its length where there is none."""
    longest = max((len(tag) for tag in tags), default=1)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[at:]) for tag in tags):
            return at
    return len(text)
