"""Parser of a whole answer: splits off the reasoning, then finds tool calls in the rest.

A model sometimes calls a tool inside its reasoning and ends without closing it. If an answer has neither text
nor calls, the calls at the end of its reasoning count.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from localchat.chat_format.harmony_parser import FUNCTIONARY, HARMONY, MUSE, ChannelParser
from localchat.chat_format.parser import Answer, Call, ChoiceParser, Part, Thought
from localchat.chat_format.reasoning_parser import ReasoningFamily, ReasoningParser
from localchat.chat_format.tool_calls.family import ToolCallFamily
from localchat.chat_format.tool_calls.parser import CallParser, name_and_parameters

_CHANNELS = {"harmony": HARMONY, "muse": MUSE, "functionary-3.2": FUNCTIONARY}
_MAX_STARTS = 16
_MAX_THOUGHT = 262_144
"""Characters of unclosed reasoning that are searched for calls."""


class AnswerParser:
    """Chains a parser of reasoning and one of calls. `late`: finds calls in unclosed reasoning."""

    def __init__(
        self,
        reasoning: ReasoningParser | ChannelParser,
        calls: CallParser,
        late: CallParser | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._late_parser = late
        self._thoughts: list[str] = []
        self._thought_characters = 0

    @property
    def thinking(self) -> bool:
        return self._reasoning.thinking

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
        """Calls at the end of reasoning that nothing followed.

        They begin at the first tag after which there are only calls, else at the last tag.
        """
        if self._late_parser is None:
            return []
        thought = "".join(self._thoughts)
        tag = re.compile("|".join(map(re.escape, self._late_parser.opens)))
        starts = [found.start() for found in tag.finditer(thought)][-_MAX_STARTS:]
        found: list[Part] = []
        for at in starts:
            calls = self._late_parser.restarted()
            parts = [*calls.feed(thought[at:]), *calls.finish()]
            found = [part for part in parts if isinstance(part, Call)]
            if found and all(one is other for one, other in zip(found, parts, strict=False)):
                break  # no text between them
        return found


def make_answer_parser(
    reasoning: ReasoningFamily,
    family: ToolCallFamily,
    tools: Sequence[Mapping[str, Any]],
    *,
    opened: bool,
) -> ChoiceParser:
    """Make the parser of a whole answer. `opened`: the prompt ends inside a block of reasoning.

    Without tools, nothing is taken for a call.
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
    """Make the part of an answer's parser that splits off reasoning."""
    syntax = _CHANNELS.get(reasoning.name) or _CHANNELS.get(family.name)
    if syntax is not None:
        names = tuple(name for name, _ in map(name_and_parameters, tools) if name)
        return ChannelParser(syntax, names, thinking=opened)
    ends = tuple(tag for tag in family.opens if tag[:2] in ("<|", "<｜", "[T")) if tools else ()
    return ReasoningParser(reasoning, opened=opened, ends=ends)
