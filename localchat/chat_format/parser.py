"""Interface of the answer parsers, and the search for tags in streamed text."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from localchat.backend_api.sealed_text import TextPart


@dataclass(frozen=True, slots=True)
class Answer:
    """Piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """Piece of a tool call. The first piece of a call has its id and name."""

    number: int
    """Index of the call in the answer, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """The arguments of all pieces together are JSON text."""


Part: TypeAlias = Answer | Thought | Call


class Parser(Protocol):
    """Turns streamed text into parts. One parser for each choice; it never raises."""

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain now; pieces are never empty."""
        ...

    def finish(self) -> list[Part]:
        """Parts of the text that was held back, at the end of the answer."""
        ...


class ChoiceParser(Parser, Protocol):
    """Parses everything that a choice has: reasoning, answer and calls."""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt that a chat format made of a conversation."""

    text: str
    parts: tuple[TextPart, ...] = ()
    """Pieces of the text to tokenize one by one, because some are plain text. Empty: the whole text."""
    special: bool = True
    """Control tokens in the text are recognized."""
    add_bos: bool = False
    """The tokenizer shall put its own first token before it (a template writes its own)."""
    opens_reasoning: bool = False
    """The prompt ends inside a block of reasoning, so the answer begins there."""
    may_reason: bool = False
    """The answer may begin with a block of reasoning."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the model may call."""
    think_budget: int | None = None
    """Most tokens of reasoning; None: no limit."""


def find_first(text: str, tags: Iterable[str]) -> tuple[int, str]:
    """Find the earliest tag, the longest if two begin together; (0, "") if there is none."""
    found = [(at, -len(tag), tag) for tag in tags if (at := text.find(tag)) >= 0]
    if not found:
        return 0, ""
    at, _, tag = min(found)
    return at, tag


def partial_tag_start(text: str, tags: tuple[str, ...]) -> int:
    """Find an incomplete tag at the end of the text; the text's length if there is none."""
    longest = max(map(len, tags), default=1)
    found = _incomplete_tag(tags).search(text, max(0, len(text) - longest + 1))
    return found.start() if found is not None else len(text)


@lru_cache(64)
def _incomplete_tag(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the beginning of a tag at the end of a text."""
    beginnings = {tag[:length] for tag in tags for length in range(1, len(tag) + 1)}
    ranked = sorted(beginnings, key=len, reverse=True)
    return re.compile(f"(?:{'|'.join(map(re.escape, ranked))})\\Z" if ranked else r"(?!)")
