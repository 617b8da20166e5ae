"""Interface of tool call bodies, JSON objects with mistakes, and the JSON body."""

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

BLANKS = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_RUN_AND_ESCAPES = re.compile(r'(?:[^"\\]+|\\["\\/bfnrtu])++')
_SCALAR = re.compile(r'[^\s"\[\]{},<]+')
_ESCAPED = {code: f"\\u{code:04x}" for code in range(32)} | {10: "\\n", 13: "\\r", 9: "\\t"}
_CONTROL = re.compile(r"[\x00-\x1f]")


class JsonObject:
    """Collects an object that arrives in pieces, from its opening bracket on.

    It repairs common mistakes of models: a comma before a closing bracket, a bracket of the wrong kind, and
    line breaks in strings. It reads runs of text, because an argument may be a file of a million lines.
    """

    def __init__(self) -> None:
        self.done = False
        """Whether the object has ended, or a tag that cannot be part of it follows."""
        self._out: list[str] = []
        self._open: list[str] = []
        self._string = False
        self._escape = False
        self._buffer = ""

    @property
    def closed(self) -> bool:
        """Whether all brackets are closed."""
        return self.done and not self._open

    @property
    def text(self) -> str:
        """JSON text so far."""
        return "".join(self._out)

    @property
    def closed_text(self) -> str:
        """JSON text with the last bracket if only that is missing."""
        if self._open == ["{"] and not self._string:
            return self.text + "}"
        return self.text

    def feed(self, text: str, index: int = 0) -> int:
        """Read text from an index on. Return the index after it."""
        while index < len(text) and not self.done:
            if self._string:
                index = self._in_string(text, index)
            else:
                index = self._between(text, index)
        return index

    def _between(self, text: str, index: int) -> int:
        character = text[index]
        if character == "<":
            self.done = True
            return index
        if character in BLANKS or character == ",":
            self._buffer += character
            return index + 1
        if character in "}]":
            # Drop a comma before a closing bracket. One of the wrong kind closes this object, too.
            self._out += self._buffer.replace(",", ""), _CLOSERS[self._open.pop()]
            self._buffer = ""
            self.done = not self._open
            return index + 1
        end = index + 1
        if run := _SCALAR.match(text, index):
            end = run.end()
        self._out += self._buffer, text[index:end]
        self._buffer = ""
        if character == '"':
            self._string = True
        elif character in _CLOSERS:
            self._open.append(character)
        return end

    def _in_string(self, text: str, index: int) -> int:
        if self._escape:
            self._escape = False
            self._out.append(_escaped(text[index]))
            return index + 1
        run = _RUN_AND_ESCAPES.match(text, index)
        if run:
            self._out.append(_with_escapes(run.group()))
            return run.end()
        self._out.append(text[index])
        if text[index] == "\\":
            self._escape = True
        else:
            self._string = False
        return index + 1


def _with_escapes(text: str) -> str:
    """Escape the control characters of a string."""
    if _CONTROL.search(text):
        return text.translate(_ESCAPED)
    return text


def _escaped(character: str) -> str:
    """Return the escape for a character after a backslash.

    If JSON has no such escape, the backslash is literal.
    """
    if character < " ":
        return _ESCAPED[ord(character)][1:]
    if character in '"\\/bfnrtu':
        return character
    return "\\" + character


def json_text(value: object) -> str:
    """Return a value as JSON. Half of a pair of surrogates becomes U+FFFD."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


State: TypeAlias = Literal["open", "done", "none"]
"""`none`: the text is not a call."""

_NAME_KEYS = ("name", "function", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_CALL_KEYS = (*_NAME_KEYS, *_ARGUMENT_KEYS, "type", "id", "tool_call_id")
_DOUBLED = re.compile(r"\{\s*(?=\{)")
"""The template of Qwen2.5-Coder shows doubled braces, and the model copies them."""
_STRING = r'"((?:[^"\\]|\\.)*)"'
_FIRST_KEY = re.compile(rf"(?:\{{\s*)+{_STRING}\s*:\s*(?:{_STRING})?")
_NO_KEY = re.compile(r'(?:\{\s*)+[^\s"{}]')


class CallBody(Protocol):
    """Reads one tool call. Never raises."""

    state: State
    name: str
    """Name of the tool, once it is known."""

    @property
    def arguments(self) -> str:
        """JSON text of the arguments, once the state is `done`."""
        ...

    def feed(self, text: str) -> str:
        """Add text. Once the state is no longer open, return the text that is not part of the call."""
        ...

    def finish(self) -> None:
        """Handle the end of the answer."""
        ...


class JsonBody:
    """Reads `{"name": "…", "arguments": {…}}` with keys in any order.

    Other keys are ignored. Arguments may be a string that contains JSON. `function` may contain the object of
    name and arguments.
    """

    def __init__(self, offered: Sequence[str], *, untagged: bool) -> None:
        """offered: tool names, which may also be keys of their own arguments.

        untagged: the call has no tag, so it needs an offered name and no other keys.
        """
        self.state: State = "open"
        self.name = ""
        self.arguments = ""
        self._offered = offered
        self._untagged = untagged
        self._may_be_other = untagged
        self._object = JsonObject()

    def feed(self, text: str) -> str:
        index = self._object.feed(text)
        if self._object.done:
            self._decide(self._object.closed_text, complete=self._object.closed)
        elif self._may_be_other and self._is_other():
            # Another object need not wait for its end.
            self.state = "none"
        return text[index:]

    def finish(self) -> None:
        if self.state != "open":
            return
        self._decide(self._object.closed_text, complete=False)
        first = _FIRST_KEY.match(self._object.text)
        if first is not None and first[1] in _NAME_KEYS and first[2] in self._offered:
            self.name = first[2]

    def _is_other(self) -> bool:
        """Return whether the first key shows that an object without a tag is no call."""
        text = self._object.text
        first = _FIRST_KEY.match(text)
        if first is None:
            return _NO_KEY.match(text) is not None
        key, name = first.groups()
        if key not in _CALL_KEYS:
            return True
        self._may_be_other = key in _NAME_KEYS and name is None
        return key in _NAME_KEYS and name is not None and name not in self._offered

    def _decide(self, text: str, *, complete: bool) -> None:
        """Decide whether the object is a call. One that is not complete needs its arguments."""
        self.state = "none"
        if doubled := _DOUBLED.match(text):
            text = text[doubled.end() : -1]
        try:
            call: dict[str, Any] = json.loads(text)
        except (ValueError, RecursionError):
            return
        if self._untagged and not call.keys() <= set(_CALL_KEYS):
            return
        if isinstance(inner := call.get("function"), dict):
            call |= inner
        name = next((call[key] for key in _NAME_KEYS if isinstance(call.get(key), str)), "")
        arguments = next((call[key] for key in _ARGUMENT_KEYS if key in call), None)
        if not name and not self._untagged:
            # The key is the name, as in `{"tool": {…}}`.
            names = (key for key in call if key in self._offered and isinstance(call[key], dict))
            name = next(names, "")
            arguments = call.get(name)
        if not name or (self._untagged and name not in self._offered):
            return
        if not complete and arguments is None:
            return
        self.state = "done"
        self.name = name
        self.arguments = "{}"
        if isinstance(arguments, str):
            self.arguments = arguments or "{}"
        elif arguments is not None:
            self.arguments = json_text(arguments)
