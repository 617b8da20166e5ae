"""The parser of a whole answer: reasoning first, then calls in what is left.

A model that reasons sometimes calls a tool and ends without having closed its reasoning. Where an answer says
nothing and calls nothing, the last call in what was thought is a call after all.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from localchat.chat_format.harmony_parser import FUNCTIONARY, HARMONY, MUSE, ChannelParser
from localchat.chat_format.parser import Answer, Call, Parser, Part, Thought
from localchat.chat_format.reasoning_parser import Family, Splitter
from localchat.chat_format.tool_calls.family import ToolCallFamily
from localchat.chat_format.tool_calls.parser import CallParser, described

_CHANNELS = {"harmony": HARMONY, "muse": MUSE, "functionary-3.2": FUNCTIONARY}
_MOST_PLACES = 16
_MOST_KEPT = 262_144
"""Characters of an unfinished thought in which a call is looked for."""


class AnswerParser:
    """Reasoning is split off first; calls are looked for in the rest. `late`: a parser for calls in an
    unfinished thought."""

    def __init__(self, reasoning: Parser, calls: Parser, late: CallParser | None = None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._late = late
        self._thoughts: list[str] = []
        self._kept = 0

    def feed(self, text: str) -> list[Part]:
        return self._through(self._reasoning.feed(text))

    def finish(self) -> list[Part]:
        parts = [*self._through(self._reasoning.finish()), *self._calls.finish()]
        if parts and any(not isinstance(part, Thought) for part in parts):
            self._late = None
        return [*parts, *self._rescued()]

    def _through(self, parts: list[Part]) -> list[Part]:
        told: list[Part] = []
        for part in parts:
            if isinstance(part, Answer):
                told += self._calls.feed(part.text)
                if part.text.strip():
                    self._late = None
            else:
                told.append(part)
                self._remember(part)
        return told

    def _remember(self, part: Part) -> None:
        if isinstance(part, Call):
            self._late = None
        elif self._late is not None and isinstance(part, Thought):
            self._thoughts.append(part.text)
            self._kept += len(part.text)
            if self._kept > _MOST_KEPT:
                self._late = None
                self._thoughts.clear()

    def _rescued(self) -> list[Part]:
        """The calls at the end of a thought that nothing followed: from the first tag behind which only calls
        stand, else from the last."""
        if self._late is None:
            return []
        thought = "".join(self._thoughts)
        tag = re.compile("|".join(map(re.escape, self._late.opens)))
        places = [found.start() for found in tag.finditer(thought)][-_MOST_PLACES:]
        found: list[Part] = []
        for at in places:
            calls = self._late.anew()
            parts = [*calls.feed(thought[at:]), *calls.finish()]
            found = [part for part in parts if isinstance(part, Call)]
            if found and all(one is other for one, other in zip(found, parts, strict=False)):
                break  # nothing is said between them
        return found


def with_calls(
    family: Family, style: ToolCallFamily, tools: Sequence[Mapping[str, Any]], *, opened: bool
) -> Parser:
    """The parser of a whole answer; without tools there are no calls to look for. `opened`: the prompt ends
    inside of what the model thinks."""
    form = _CHANNELS.get(family.name) or _CHANNELS.get(style.name)
    if form is not None:
        names = tuple(name for name, _ in map(described, tools) if name)
        channels = ChannelParser(form, names, thinking=opened)
        if form is HARMONY or not tools:
            return channels
        return AnswerParser(channels, CallParser(style, tools))
    ends = tuple(tag for tag in style.opens if tag[:2] in ("<|", "<｜", "[T")) if tools else ()
    splitter = Splitter(family, opened=opened, ends=ends)
    if not tools:
        return splitter
    return AnswerParser(splitter, CallParser(style, tools), CallParser(style, tools))
