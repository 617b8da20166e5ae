"""Parser that finds tool calls in streamed answers.

The text after a tag decides the syntax, not the family, so a model may use another family's syntax. A call is
reported once it is complete. Text that turns out not to be a call is passed on unchanged. White space, fences
and brackets around calls are dropped.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from localchat.chat_format.parser import Answer, Call, Part, find_first, partial_tag_start
from localchat.chat_format.tool_calls.family import TAG_FIRST, ToolCallFamily
from localchat.chat_format.tool_calls.json_body import CallBody, JsonBody
from localchat.chat_format.tool_calls.python_body import NameFirstBody
from localchat.chat_format.tool_calls.xml_body import XmlBody

_FENCES = ("```json", "```tool_call", "```tool_code", "```xml", "```python", "```")
_TAIL = re.compile(r"\s*`{1,3}\w{0,12}\Z")
_FENCE = re.compile(r"`{3}\w*\Z")
_MAX_TAIL = 40
_START = re.compile(r"\s*(`{3}\w{0,12}\s*)?\[?\s*")
_FIRST_TAGS = tuple(syntax.name[0] for syntax in TAG_FIRST)
_PYTHON_FENCE = "```tool_code"
_FENCED_OBJECT = re.compile(r"(?<!`)`{3}(?:json|tool_call|xml)?\s*(?=\{)")
"""Start of a code block with an object. Small models write it instead of a tag."""


class CallParser:
    """Separates text from tool calls."""

    def __init__(self, family: ToolCallFamily, tools: Sequence[Mapping[str, Any]]) -> None:
        """tools: the offered tools, as in the request."""
        self._family = family
        self._tools = tools
        self._schemas = {name: schema for name, schema in map(name_and_parameters, tools) if name}
        self._state: Literal["text", "seek", "body"] = "text"
        self._at_start = True
        self._has_text = False
        self._gap = ""
        self._buffer = ""
        self._skipped = ""
        self._body: CallBody = JsonBody((), untagged=False)
        self._untagged = False
        self._closed = False
        self._in_list = False
        self._count = 0

    def restarted(self) -> "CallParser":
        """Return a new parser for the same family and tools."""
        return CallParser(self._family, self._tools)

    @property
    def opens(self) -> tuple[str, ...]:
        """Tags after which a call may follow."""
        return self._family.opens

    def feed(self, text: str) -> list[Part]:
        """Add text, and return the parts that are certain."""
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the parts of the buffered text.

        A call without its closing tag counts. An incomplete call after its tag, or of an offered tool, is
        dropped, because the answer was truncated.
        """
        parts: list[Part] = []
        if self._state == "body":
            self._body.finish()
            if self._body.state == "done":
                self._emit_call(parts)
            elif self._untagged and not self._body.name:
                _emit_text(parts, self._skipped + self._buffer)
        elif self._state == "text":
            _emit_text(parts, self._buffer)
        self._buffer = self._skipped = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Process the next token of the buffer. Return False if more text is needed."""
        if not self._buffer:
            return False
        match self._state:
            case "text":
                return self._text(parts)
            case "seek":
                return self._between_calls(parts)
            case "body":
                return self._read(parts)

    def _text(self, parts: list[Part]) -> bool:
        if self._at_start and self._family.untagged:
            decided = self._untagged_call()
            if decided is not None:
                return decided
        index, tag = find_first(self._buffer, self._family.opens)
        if self._family.untagged:
            fenced = _FENCED_OBJECT.search(self._buffer)
            if fenced is not None and (not tag or fenced.start() < index):
                self._fenced_call(fenced, parts)
                return True
        if tag:
            self._emit_text(parts, _unfenced(self._buffer[:index]))
            self._buffer = self._buffer[index:]
            self._skipped = ""
            if tag not in _FIRST_TAGS:
                self._skipped = tag
                self._buffer = self._buffer[len(tag) :]
            self._untagged = self._closed = self._at_start = False
            self._state = "seek"
            return True
        end = _tail(self._buffer[: partial_tag_start(self._buffer, self._family.opens)])
        self._emit_text(parts, self._buffer[:end])
        self._buffer = self._buffer[end:]
        return False

    def _untagged_call(self) -> bool | None:
        """Start a call without a tag at the start of an answer. None: the answer starts with something else."""
        start = _START.match(self._buffer)
        assert start is not None
        call = self._buffer[start.end() :]
        if not call or call in ("`", "``"):
            return False
        in_list = start.group().rstrip().endswith(("[", _PYTHON_FENCE))
        if in_list and any(name.startswith(call) and name != call for name in self._schemas):
            return False
        if call[0] == "{":
            self._untagged = True
            self._begin(self._json_body())
        elif in_list and call.startswith(tuple(self._schemas)):
            self._untagged = True
            self._begin(self._name_first_body())
        else:
            return None
        self._skipped = self._buffer[: start.end()]
        self._buffer = call
        self._closed = False
        self._at_start = False
        return True

    def _fenced_call(self, fenced: re.Match[str], parts: list[Part]) -> None:
        """Start a call in a code block after text. It stays text unless it names an offered tool."""
        self._emit_text(parts, self._buffer[: fenced.start()].rstrip())
        self._at_start = self._closed = False
        self._untagged = True
        # The white space before a block belongs to it if it turns out to be text.
        gap = self._buffer[len(self._buffer[: fenced.start()].rstrip()) : fenced.end()]
        self._skipped = gap
        self._buffer = self._buffer[fenced.end() :]
        self._begin(self._json_body())

    def _emit_text(self, parts: list[Part], text: str) -> None:
        if text:
            self._at_start = False
            self._has_text = True
            _emit_text(parts, text)

    def _between_calls(self, parts: list[Part]) -> bool:
        """Skip white space, brackets, fences and tags before, between and after calls."""
        text = self._buffer
        family = self._family
        if text[0].isspace():
            blanks = len(text) - len(text.lstrip())
            self._gap += text[:blanks]
            return self._skip(blanks, keep_gap=True)
        fences = _FENCES if self._skipped else ("```",)
        tags = (*family.opens, *family.closes, *_FIRST_TAGS, *fences)
        possible = (*tags, *family.separators)
        if any(tag.startswith(text) and tag != text for tag in possible) or text == "```":
            return False
        tag = max((tag for tag in tags if text.startswith(tag)), key=len, default="")
        if tag and tag not in _FIRST_TAGS:
            return self._skip_tag(tag, parts)
        if not tag and text[0] in ("[" if self._skipped else ",;]})"):
            return self._skip(1)
        if self._closed and not tag:
            return self._give_up(parts)
        if text[0] == "{":
            self._begin(self._json_body())
        elif tag:
            syntax = next(syntax for syntax in TAG_FIRST if syntax.name[0] == tag)
            self._begin(XmlBody(syntax, self._schemas))
        elif (self._skipped or self._in_list) and (
            text[0].isalnum() or text.startswith(family.separators or "_")
        ):
            self._untagged = self._untagged or not self._skipped
            self._begin(self._name_first_body())
        else:
            return self._give_up(parts)
        return True

    def _json_body(self) -> CallBody:
        return JsonBody(list(self._schemas), untagged=self._untagged)

    def _name_first_body(self) -> CallBody:
        family = self._family
        return NameFirstBody(
            self._schemas,
            family.separators,
            closes=family.closes,
            untagged=self._untagged,
        )

    def _skip_tag(self, tag: str, parts: list[Part]) -> bool:
        if tag in self._family.closes:
            if self._skipped:
                return self._give_up(parts)
            self._closed = True
        elif tag in self._family.opens:
            self._skipped += tag
            self._closed = False
            self._untagged = False
            self._buffer = self._buffer[len(tag) :]
            return True
        elif not self._skipped and self._buffer[3:4].isalnum():
            # A code block follows the calls.
            return self._give_up(parts)
        return self._skip(len(tag))

    def _skip(self, count: int, *, keep_gap: bool = False) -> bool:
        if not keep_gap:
            self._gap = ""
        if self._skipped:
            self._skipped += self._buffer[:count]
        self._buffer = self._buffer[count:]
        return True

    def _give_up(self, parts: list[Part]) -> bool:
        """Return to the state `text`, and emit skipped text that led to no call."""
        if self._skipped:
            self._emit_text(parts, self._skipped)
        elif self._has_text:
            self._emit_text(parts, self._gap)
        self._skipped = ""
        self._gap = ""
        self._state = "text"
        self._in_list = False
        return True

    def _begin(self, body: CallBody) -> None:
        self._body = body
        self._state = "body"

    def _read(self, parts: list[Part]) -> bool:
        remaining = self._body.feed(self._buffer)
        text = self._skipped + self._buffer
        self._skipped = text[: len(text) - len(remaining)]
        self._buffer = remaining
        if self._body.state == "none":
            # Emit the text that was read. The remaining text may contain another tag.
            if not self._skipped:
                # Skip one character of the call's own tag, which would match again.
                self._skipped = self._buffer[:1]
                self._buffer = self._buffer[1:]
            self._state = "text"
            self._emit_text(parts, self._skipped)
            self._skipped = ""
            return True
        if self._body.state == "done":
            self._emit_call(parts)
            self._in_list = isinstance(self._body, NameFirstBody) and self._body.in_python_list
            self._state = "seek"
            self._skipped = ""
            self._gap = ""
            return True
        return False

    def _emit_call(self, parts: list[Part]) -> None:
        parts.append(Call(self._count, self._id(), self._body.name))
        parts.append(Call(self._count, arguments=self._body.arguments))
        self._count += 1

    def _id(self) -> str:
        if self._family.short_ids:
            return secrets.token_hex(5)[:9]
        return f"call_{secrets.token_hex(12)}"


def _tail(text: str) -> int:
    """Return where the white space or the fence at the end of a text starts."""
    end = len(text.rstrip())
    start = max(0, end - _MAX_TAIL)
    match = _TAIL.search(text[start:end])
    return start + match.start() if match else end


def _unfenced(text: str) -> str:
    """Remove white space and a fence from the end of a text before a call."""
    text = text.rstrip()
    start = max(0, len(text) - _MAX_TAIL)
    return (text[:start] + _FENCE.sub("", text[start:])).rstrip()


def _emit_text(parts: list[Part], text: str) -> None:
    if text:
        parts.append(Answer(text))


def name_and_parameters(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and parameters of a tool, which may be wrapped as a function."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return "", {}
    schema = function.get("parameters")
    return str(function.get("name", "")), schema if isinstance(schema, Mapping) else {}
