"""Interface of the answer parsers, and functions that find tags in streamed text."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

from localchat.backend_api.sealed_text import TextPart
from localchat.engine.request import Attachment


@dataclass(frozen=True, slots=True)
class Answer:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A piece of a tool call. The first piece has the id and the name."""

    number: int
    """Index of the call in the answer, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """Part of the JSON text of the arguments."""


Part: TypeAlias = Answer | Thought | Call


class Parser(Protocol):
    """Turns the streamed text of one choice into parts. Never raises."""

    def feed(self, text: str) -> list[Part]:
        """Add text, and return the parts that are certain. Parts are never empty."""
        ...

    def finish(self) -> list[Part]:
        """Return the parts of the buffered text at the end of the answer."""
        ...


class ChoiceParser(Parser, Protocol):
    """Parses the reasoning, the answer and the calls of a choice."""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        ...

    def passes(self, text: str) -> bool:
        """Return whether the parser has no use for a text.

        `feed` would return it unchanged as a part of the answer, and store nothing.
        """
        ...


class PlacedAttachment(NamedTuple):
    """A picture or a recording in a prompt."""

    part: int
    """Number of parts before it."""
    attachment: Attachment


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt of a conversation."""

    text: str
    parts: tuple[TextPart, ...] = ()
    """Pieces to tokenize separately, because some are plain text, or pictures lie between them. Empty if the
    whole text is trusted."""
    attachments: tuple[PlacedAttachment, ...] = ()
    """Pictures and recordings between the parts, in order."""
    special: bool = True
    """Whether control tokens in the text are recognized."""
    add_bos: bool = False
    """Whether the tokenizer adds its first token. Templates write their own."""
    opens_reasoning: bool = False
    """Whether the prompt ends inside reasoning, so that the answer starts there."""
    may_reason: bool = False
    """Whether the answer may start with reasoning."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the model may call."""
    think_budget: int | None = None
    """Maximum number of reasoning tokens, None without a limit."""


def find_first(text: str, tags: Iterable[str]) -> tuple[int, str]:
    """Return the index and text of the first tag, or (0, "").

    If several tags start at one position, the longest wins.
    """
    matches = [(index, -len(tag), tag) for tag in tags if (index := text.find(tag)) >= 0]
    if not matches:
        return 0, ""
    index, _, tag = min(matches)
    return index, tag


def partial_tag_start(text: str, tags: tuple[str, ...]) -> int:
    """Return the index of an incomplete tag at the end of a text, otherwise its length."""
    max_length = max(map(len, tags), default=1)
    match = _incomplete_tag(tags).search(text, max(0, len(text) - max_length + 1))
    return match.start() if match is not None else len(text)


@lru_cache(64)
def _incomplete_tag(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches the start of a tag at the end."""
    starts = {tag[:length] for tag in tags for length in range(1, len(tag) + 1)}
    if not starts:
        return re.compile(r"(?!)")
    longest_first = sorted(starts, key=len, reverse=True)
    return re.compile(f"(?:{'|'.join(map(re.escape, longest_first))})\\Z")
