"""Parser of a whole answer: separates the reasoning, then finds tool calls in the remaining text.

A model sometimes calls a tool inside its reasoning and ends without closing it. If an answer has neither text
nor calls, the calls at the end of its reasoning count.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from localchat.chat_format.harmony_parser import HARMONY, MUSE, ChannelParser
from localchat.chat_format.parser import Answer, Call, ChoiceParser, Part, Thought
from localchat.chat_format.reasoning_parser import ReasoningFamily, ReasoningParser
from localchat.chat_format.tool_calls.family import ToolCallFamily
from localchat.chat_format.tool_calls.parser import CallParser, name_and_parameters

_CHANNELS = {"harmony": HARMONY, "muse": MUSE}
_MAX_STARTS = 16
_MAX_THOUGHT = 262_144
"""Characters of unclosed reasoning that are searched for calls."""


class AnswerParser:
    """Chains a reasoning parser and a call parser."""

    def __init__(
        self,
        reasoning: ReasoningParser | ChannelParser,
        calls: CallParser,
        late: CallParser | None = None,
    ) -> None:
        """late: finds calls in unclosed reasoning."""
        self._reasoning = reasoning
        self._calls = calls
        self._late_parser = late
        self._thoughts: list[str] = []
        self._thought_characters = 0

    @property
    def thinking(self) -> bool:
        return self._reasoning.thinking

    def passes(self, text: str) -> bool:
        # A call may begin with any character.
        return False

    def feed(self, text: str) -> list[Part]:
        return self._parse_answers(self._reasoning.feed(text))

    def finish(self) -> list[Part]:
        parts = [*self._parse_answers(self._reasoning.finish()), *self._calls.finish()]
        if parts and any(not isinstance(part, Thought) for part in parts):
            self._late_parser = None
        return [*parts, *self._late_calls()]

    def _parse_answers(self, parts: list[Part]) -> list[Part]:
        parsed: list[Part] = []
        for part in parts:
            if isinstance(part, Answer):
                parsed += self._calls.feed(part.text)
                if part.text.strip():
                    self._late_parser = None
            else:
                parsed.append(part)
                self._remember(part)
        return parsed

    def _remember(self, part: Part) -> None:
        if isinstance(part, Call):
            self._late_parser = None
        elif self._late_parser is not None and isinstance(part, Thought):
            self._thoughts.append(part.text)
            self._thought_characters += len(part.text)
            if self._thought_characters > _MAX_THOUGHT:
                self._late_parser = None
                self._thoughts.clear()

    def _late_calls(self) -> list[Part]:
        """Return the calls at the end of reasoning that no text follows.

        They start at the first tag after which there are only calls, otherwise at the last tag.
        """
        if self._late_parser is None:
            return []
        thought = "".join(self._thoughts)
        tag = re.compile("|".join(map(re.escape, self._late_parser.opens)))
        starts = [match.start() for match in tag.finditer(thought)][-_MAX_STARTS:]
        calls: list[Part] = []
        for start in starts:
            parser = self._late_parser.restarted()
            parts = [*parser.feed(thought[start:]), *parser.finish()]
            calls = [part for part in parts if isinstance(part, Call)]
            # Text may follow the calls, but not come between them.
            if calls and parts[: len(calls)] == calls:
                break
        return calls


def make_answer_parser(
    reasoning: ReasoningFamily,
    family: ToolCallFamily,
    tools: Sequence[Mapping[str, Any]],
    *,
    opened: bool,
) -> ChoiceParser:
    """Return the parser of a whole answer. Without tools it finds no calls.

    opened: the prompt ends inside reasoning.
    """
    first = make_reasoning_parser(reasoning, family, tools, opened=opened)
    if not tools or (isinstance(first, ChannelParser) and first.syntax is HARMONY):
        return first
    late = None if isinstance(first, ChannelParser) else CallParser(family, tools)
    return AnswerParser(first, CallParser(family, tools), late)


def make_reasoning_parser(
    reasoning: ReasoningFamily,
    family: ToolCallFamily,
    tools: Sequence[Mapping[str, Any]],
    *,
    opened: bool,
) -> ReasoningParser | ChannelParser:
    """Return the part of an answer's parser that separates reasoning."""
    syntax = _CHANNELS.get(reasoning.name) or _CHANNELS.get(family.name)
    if syntax is not None:
        names = tuple(name for name, _ in map(name_and_parameters, tools) if name)
        return ChannelParser(syntax, names, thinking=opened)
    ends: tuple[str, ...] = ()
    if tools:
        # Only tags that a model would not quote in its reasoning end it.
        ends = tuple(tag for tag in family.opens if tag[:2] in ("<|", "<｜", "[T"))
    return ReasoningParser(reasoning, opened=opened, ends=ends)
