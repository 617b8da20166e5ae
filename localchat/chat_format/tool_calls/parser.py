"""Parser of tool calls: finds them in an answer as it streams.

The text after a tag decides how it is parsed, not the family, so a model may write another family's syntax. A
call is reported as soon as it can be nothing else; text that turns out not to be one is passed on unchanged.
Blanks, fences and brackets around calls are dropped.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from localchat.chat_format.parser import Answer, Call, Part, find_first, partial_tag_start
from localchat.chat_format.tool_calls.family import HEADED, ToolCallFamily
from localchat.chat_format.tool_calls.json_body import CallBody, JsonBody
from localchat.chat_format.tool_calls.minimax_body import INVOKE, MinimaxBody
from localchat.chat_format.tool_calls.python_body import NameFirstBody
from localchat.chat_format.tool_calls.xml_body import XmlBody

_FENCES = ("```json", "```tool_call", "```tool_code", "```xml", "```python", "```")
_TAIL = re.compile(r"\s*`{1,3}\w{0,12}\Z")
_FENCE = re.compile(r"`{3}\w*\Z")
_LONGEST_TAIL = 40
_BEGINNING = re.compile(r"\s*(`{3}\w{0,12}\s*)?\[?\s*")
_HEADS = (*(syntax.name[0] for syntax in HEADED), INVOKE)
_PYTHON_FENCE = "```tool_code"


class CallParser:
    """Splits text from tool calls. `tools`: the tools that were offered, as in the request."""

    def __init__(self, family: ToolCallFamily, tools: Sequence[Mapping[str, Any]]) -> None:
        self._family = family
        self._tools = tools
        self._schemas = {name: schema for name, schema in map(name_and_parameters, tools) if name}
        self._state: Literal["text", "seek", "body"] = "text"
        self._fresh = True
        self._has_text = False
        self._gap = ""
        self._held = ""
        self._raw = ""
        self._body: CallBody = JsonBody((), bare=False)
        self._bare = False
        self._closed = False
        self._in_list = False
        self._emitted = False
        self._count = 0

    def restarted(self) -> "CallParser":
        """Make the same parser, at its beginning."""
        return CallParser(self._family, self._tools)

    @property
    def opens(self) -> tuple[str, ...]:
        """Tags after which a call may follow."""
        return self._family.opens

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Parts of the text that was held back.

        A call without its closing tag counts. The mere beginning of one after its tag belongs to an
        answer that was cut off, and is dropped.
        """
        parts: list[Part] = []
        if self._state == "body":
            self._body.finish()
            self._emit_call(parts)
            if self._body.state == "none" and self._bare:
                _emit_text(parts, self._raw + self._held)
        elif self._state == "text":
            _emit_text(parts, self._held)
        self._held = self._raw = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Advance by one token; False if more text is needed."""
        if not self._held:
            return False
        match self._state:
            case "text":
                return self._text(parts)
            case "seek":
                return self._between_calls(parts)
            case "body":
                return self._read(parts)

    # ------------------------------------------------------------------------ text

    def _text(self, parts: list[Part]) -> bool:
        if self._fresh and self._family.bare:
            bare = _BEGINNING.match(self._held)
            assert bare is not None
            rest = self._held[bare.end() :]
            if not rest or rest in ("`", "``"):
                return False
            in_list = bare.group().rstrip().endswith(("[", _PYTHON_FENCE))
            if in_list and any(name.startswith(rest) and name != rest for name in self._schemas):
                return False
            if rest[0] == "{" or (in_list and rest.startswith(tuple(self._schemas))):
                self._raw = self._held[: bare.end()]
                self._held = rest
                self._bare = True
                self._closed = False
                self._fresh = False
                self._begin(self._json_body() if rest[0] == "{" else self._name_first_body())
                return True
        at, tag = find_first(self._held, self._family.opens)
        if tag:
            self._emit_text(parts, _unfenced(self._held[:at]))
            self._held = self._held[at:]
            self._raw = ""
            if tag not in _HEADS:
                self._raw, self._held = tag, self._held[len(tag) :]
            self._bare = self._closed = self._fresh = False
            self._state = "seek"
            return True
        at = _tail(self._held[: partial_tag_start(self._held, self._family.opens)])
        self._emit_text(parts, self._held[:at])
        self._held = self._held[at:]
        return False

    def _emit_text(self, parts: list[Part], text: str) -> None:
        if text:
            self._fresh = False
            self._has_text = True
            _emit_text(parts, text)

    # ------------------------------------------------------------------------ between a tag and a call

    def _between_calls(self, parts: list[Part]) -> bool:
        """Skip blanks, brackets, fences and tags before, between and after calls."""
        held = self._held
        family = self._family
        if held[0].isspace():
            blanks = len(held) - len(held.lstrip())
            self._gap += held[:blanks]
            return self._skip(blanks, keep_gap=True)
        fences = _FENCES if self._raw else ("```",)
        tags = (*family.opens, *family.closes, *_HEADS, *fences)
        possible = (*tags, *family.splits)
        if any(tag.startswith(held) and tag != held for tag in possible) or held == "```":
            return False
        tag = max((tag for tag in tags if held.startswith(tag)), key=len, default="")
        if tag and tag not in _HEADS:
            return self._skip_tag(tag, parts)
        if not tag and held[0] in ("[" if self._raw else ",;]})"):
            return self._skip(1)
        if self._closed and not tag:
            return self._give_up(parts)
        if held[0] == "{":
            self._begin(self._json_body())
        elif tag:
            syntax = next((syntax for syntax in HEADED if syntax.name[0] == tag), None)
            nested = MinimaxBody(self._schemas)
            self._begin(nested if syntax is None else XmlBody(syntax, self._schemas))
        elif (self._raw or self._in_list) and (
            held[0].isalnum() or held.startswith(family.splits or "_")
        ):
            self._bare = self._bare or not self._raw
            self._begin(self._name_first_body())
        else:
            return self._give_up(parts)
        return True

    def _json_body(self) -> CallBody:
        return JsonBody(list(self._schemas), bare=self._bare)

    def _name_first_body(self) -> CallBody:
        family = self._family
        return NameFirstBody(
            self._schemas,
            family.splits,
            naming=family.naming,
            closes=family.closes,
            bare=self._bare,
        )

    def _skip_tag(self, tag: str, parts: list[Part]) -> bool:
        if tag in self._family.closes:
            if self._raw:
                return self._give_up(parts)
            self._closed = True
        elif tag in self._family.opens:
            self._raw = self._raw + tag
            self._closed = False
            self._bare = False
            self._held = self._held[len(tag) :]
            return True
        elif not self._raw and self._held[3:4].isalnum():
            return self._give_up(parts)  # a block of code after the calls
        return self._skip(len(tag))

    def _skip(self, count: int, *, keep_gap: bool = False) -> bool:
        if not keep_gap:
            self._gap = ""
        if self._raw:
            self._raw += self._held[:count]
        self._held = self._held[count:]
        return True

    def _give_up(self, parts: list[Part]) -> bool:
        """Return to text, and emit what was skipped if no call came of it."""
        if self._raw:
            self._emit_text(parts, self._raw)
        elif self._has_text:
            self._emit_text(parts, self._gap)
        self._raw = ""
        self._gap = ""
        self._state = "text"
        self._in_list = False
        return True

    # ------------------------------------------------------------------------ a call

    def _begin(self, body: CallBody) -> None:
        self._body = body
        self._state = "body"
        self._emitted = False

    def _read(self, parts: list[Part]) -> bool:
        rest = self._body.feed(self._held)
        if not self._emitted:
            whole = self._raw + self._held
            self._raw = whole[: len(whole) - len(rest)]
        self._held = rest
        self._emit_call(parts)
        if self._body.state == "none":
            # A bare object is emitted unchanged; the rest after a tag may contain another tag.
            if not self._raw:
                # the call's own tag
                self._raw = self._held[:1]
                self._held = self._held[1:]
            self._state = "text"
            self._emit_text(parts, self._raw)
            self._raw = ""
            return True
        if self._body.state == "done":
            self._in_list = isinstance(self._body, NameFirstBody) and self._body.in_python_list
            self._state = "seek"
            self._raw = ""
            self._gap = ""
            return True
        return False

    def _emit_call(self, parts: list[Part]) -> None:
        name = self._body.name
        if not name:
            return
        if not self._emitted:
            self._emitted = True
            self._raw = ""
            parts.append(Call(self._count, self._id(), name))
            self._count += 1
        if pieces := self._body.arguments():
            parts.append(Call(self._count - 1, arguments=pieces))

    def _id(self) -> str:
        if self._family.short_ids:
            return secrets.token_hex(5)[:9]
        return f"call_{secrets.token_hex(12)}"


def _tail(text: str) -> int:
    """Where blanks, or a fence that may enclose a call, begin at the end of a text."""
    bare = len(text.rstrip())
    begin = max(0, bare - _LONGEST_TAIL)
    found = _TAIL.search(text[begin:bare])
    fence = begin + found.start() if found else bare
    return min(bare, fence)


def _unfenced(text: str) -> str:
    """Text before a call, without blanks and a fence at its end."""
    bare = text.rstrip()
    begin = max(0, len(bare) - _LONGEST_TAIL)
    return (bare[:begin] + _FENCE.sub("", bare[begin:])).rstrip()


def _emit_text(parts: list[Part], text: str) -> None:
    if text:
        parts.append(Answer(text))


def name_and_parameters(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and parameters of a tool, wrapped as a function or not."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return "", {}
    schema = function.get("parameters")
    return str(function.get("name", "")), schema if isinstance(schema, Mapping) else {}
