"""Interface of tool call bodies, and the body that is a JSON object.

JsonValue and JsonString read streamed JSON and repair common mistakes of models: a comma before a closing
bracket, and line breaks in strings. They read runs of text, because an argument may be a file of a million
lines.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

BLANKS = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_RUN = re.compile(r'[^"\\]+')
_RUN_AND_ESCAPES = re.compile(r'(?:[^"\\]+|\\["\\/bfnrtu])++')
_SCALAR = re.compile(r'[^\s"\[\]{},]+')
_ESCAPED = {code: f"\\u{code:04x}" for code in range(32)} | {10: "\\n", 13: "\\r", 9: "\\t"}
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(slots=True)
class JsonValue:
    """Finds the end of a JSON value and repairs its text.

    Numbers and constants end before a comma, a closing bracket or white space.
    """

    done: bool = False
    """Whether the value has ended."""
    _open: list[str] = field(default_factory=list)
    _string: bool = False
    _escape: bool = False
    _scalar: bool = False
    _buffer: str = ""

    def feed(self, text: str, index: int = 0) -> tuple[str, int]:
        out: list[str] = []
        while index < len(text) and not self.done:
            if self._string:
                index = self._in_string(text, index, out)
            elif self._scalar:
                index = self._in_scalar(text, index, out)
            else:
                index = self._between(text, index, out)
        return "".join(out), index

    def _between(self, text: str, index: int, out: list[str]) -> int:
        character = text[index]
        if character in BLANKS or (character == "," and self._open):
            if self._open:
                self._buffer += character
            return index + 1
        if character in "}]":
            return self._close(index, out)
        if self._open and (run := _SCALAR.match(text, index)):
            out += self._buffer, run.group()
            self._buffer = ""
            return run.end()
        if not self._open and character not in '{["':
            self._scalar = True
            return index
        out += self._buffer, character
        self._buffer = ""
        if character == '"':
            self._string = True
        else:
            self._open.append(character)
        return index + 1

    def _in_scalar(self, text: str, index: int, out: list[str]) -> int:
        run = _SCALAR.match(text, index)
        if run is None:
            self.done = text[index] in ",}]" or text[index] in BLANKS
            if not self.done:
                out.append(text[index])
                return index + 1
            return index
        out.append(run.group())
        return run.end()

    def _in_string(self, text: str, index: int, out: list[str]) -> int:
        if self._escape:
            self._escape = False
            out.append(_escaped(text[index]))
            return index + 1
        run = _RUN_AND_ESCAPES.match(text, index)
        if run:
            out.append(_with_escapes(run.group()))
            return run.end()
        out.append(text[index])
        if text[index] == "\\":
            self._escape = True
        else:
            self._string = False
            self.done = not self._open
        return index + 1

    def _close(self, index: int, out: list[str]) -> int:
        if not self._open:
            self.done = True
            return index
        # Drop a comma before a closing bracket. Assume that a bracket of the wrong kind closes this one.
        out += self._buffer.replace(",", ""), _CLOSERS[self._open.pop()]
        self._buffer = ""
        self.done = not self._open
        return index + 1


class JsonString:
    """Decodes a JSON string after its opening quote."""

    def __init__(self) -> None:
        self.done = False
        """Whether the closing quote was read."""
        self._escape = ""
        self._high = 0

    def feed(self, text: str, index: int = 0) -> tuple[str, int]:
        """Read text from an index on. Return the decoded text and the index after it."""
        out: list[str] = []
        while index < len(text) and not self.done:
            if self._escape:
                out.append(self._escaped(text[index]))
            elif run := _RUN.match(text, index):
                out.append(run.group())
                index = run.end()
                continue
            elif text[index] == '"':
                self.done = True
            else:
                self._escape = "\\"
            index += 1
        return "".join(out), index

    def _escaped(self, character: str) -> str:
        self._escape += character
        if self._escape.startswith("\\u"):
            if len(self._escape) < 6:
                return ""
            code = _hex(self._escape[2:])
            self._escape = ""
            if 0xD800 <= code < 0xDC00:
                self._high = code
                return ""
            if 0xDC00 <= code < 0xE000:
                code = 0x10000 + (((self._high or 0xD800) - 0xD800) << 10) + code - 0xDC00
            self._high = 0
            return chr(code)
        self._escape = ""
        return {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}.get(character, character)


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


def _hex(digits: str) -> int:
    try:
        return int(digits, 16)
    except ValueError:
        return 0xFFFD


State: TypeAlias = Literal["open", "done", "none"]
"""`none`: the text is not a call."""

_NAME_KEYS = ("name", "function", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters", "args")
_CALL_KEYS = (*_NAME_KEYS, *_ARGUMENT_KEYS, "type", "id")


class CallBody(Protocol):
    """Reads one tool call. Never raises."""

    state: State
    name: str
    """Set once the text is certainly a call. From then on, `arguments` returns text."""

    def feed(self, text: str) -> str:
        """Add text. Once the state is no longer open, return the text that is not part of the call."""
        ...

    def arguments(self) -> str:
        """Return the JSON text of the arguments that became certain since the last call."""
        ...

    def finish(self) -> None:
        """Handle the end of the answer."""
        ...


class Arguments:
    """JSON text of a call's arguments. Null and an empty text become an empty object."""

    def __init__(self) -> None:
        self._value = JsonValue()
        self._plain = False
        self._begun = False
        self._out: list[str] = []

    @property
    def done(self) -> bool:
        return self._value.done

    def feed(self, text: str, index: int = 0) -> int:
        """Read text from an index on. Return the index after it."""
        piece, index = self._value.feed(text, index)
        if piece and not self._begun:
            self._begun = True
            self._plain = piece[0] not in "{["
        if piece:
            self._out.append(piece)
        if self._value.done:
            self.close()
        return index

    def take(self) -> str:
        """Return the text that is certain. Numbers, strings and constants are certain only at their end."""
        if self._plain:
            return ""
        out = "".join(self._out)
        self._out.clear()
        return out

    def close(self) -> None:
        """Handle the end of the value."""
        if not self._begun:
            self._begun = True
            self._out = ["{}"]
        elif self._plain:
            decoded = "".join(self._out)
            if decoded == "null":
                decoded = "{}"
            self._out = [decoded]
            self._plain = False


class JsonBody:
    """Reads `{"name": "…", "arguments": {…}}` with keys in any order.

    Other keys are ignored. Arguments may be a string that contains JSON. `function` may contain the object of
    name and arguments.
    """

    def __init__(self, offered: Sequence[str], *, untagged: bool) -> None:
        """offered: tool names, which may also be keys of their own arguments.

        untagged: the call has no tag, so it needs an offered name and arguments.
        """
        self.state: State = "open"
        self.name = ""
        self._offered = offered
        self._untagged = untagged
        self._levels = 0
        self._part: Literal["key", "in key", "colon", "value", "in value", "next"] = "key"
        self._key = ""
        self._name_text = ""
        self._string: JsonString | None = None
        self._other = JsonValue()
        self._arguments: Arguments | None = None

    def feed(self, text: str) -> str:
        index = 0
        while index < len(text) and self.state == "open":
            index = self._step(text, index)
        return text[index:]

    def arguments(self) -> str:
        if not self.name or self._arguments is None:
            return ""
        return self._arguments.take()

    def finish(self) -> None:
        if self.state == "open" and not self.name:
            self.state = "none"

    def _step(self, text: str, index: int) -> int:
        """Read one token. Return the index after it."""
        character = text[index]
        match self._part:
            case "in key":
                return self._in_key(text, index)
            case "in value":
                return self._in_value(text, index)
            case _ if character in BLANKS:
                pass
            case "value":
                return self._begin_value(text, index)
            case _:
                self._between(character)
        return index + 1

    def _between(self, character: str) -> None:
        part = self._part
        if character == "{" and part == "key" and not self._levels:
            self._levels = 1
        elif character == "{" and part == "key" and self._levels == 1 and not self._key:
            pass  # the template of Qwen2.5-Coder shows doubled braces, and the model copies them
        elif character == '"' and part == "key" and self._levels:
            self._key = ""
            self._string = JsonString()
            self._part = "in key"
        elif character == ":" and part == "colon":
            self._part = "value"
        elif character == "," and part in ("next", "key") and self._levels:
            self._part = "key"
        elif character == "}" and part in ("next", "key") and self._levels:
            self._levels -= 1
            self._part = "next"
            if not self._levels:
                self._end()
        else:
            self._fail()

    def _in_key(self, text: str, index: int) -> int:
        assert self._string is not None
        decoded, index = self._string.feed(text, index)
        self._key += decoded
        if self._string.done:
            self._string = None
            self._part = "colon"
            if self._untagged and self._key not in _CALL_KEYS:
                # It is another object, so its text need not wait for its end.
                self._fail()
        return index

    def _begin_value(self, text: str, index: int) -> int:
        self._part = "in value"
        self._other = JsonValue()
        character = text[index]
        if self._key == "function" and character == "{":
            self._levels = self._levels + 1
            self._part = "key"
            return index + 1
        if self._names_itself(character):
            self._name_text = self._key
            self._key = _ARGUMENT_KEYS[0]
        if self._key in _ARGUMENT_KEYS and self._arguments is None:
            self._arguments = Arguments()
            self._accept_name()
        elif self._key not in _NAME_KEYS or self._name_text:
            self._key = ""
        if self._key and character == '"':
            self._string = JsonString()
            return index + 1
        return index

    def _names_itself(self, character: str) -> bool:
        """Whether the key is the name, as in `{"tool": {…}}`."""
        return (
            character == "{"
            and not self._name_text
            and not self._untagged
            and self._key in self._offered
        )

    def _in_value(self, text: str, index: int) -> int:
        arguments = self._arguments if self._key in _ARGUMENT_KEYS else None
        if self._string is not None:
            decoded, index = self._string.feed(text, index)
            if arguments is None:
                self._name_text += decoded
            else:
                arguments.feed(decoded)
            if self._string.done:
                self._string = None
                self._part = "next"
                if arguments is not None:
                    arguments.close()
                self._accept_name()
            return index
        if arguments is not None:
            index = arguments.feed(text, index)
            done = arguments.done
        else:
            _, index = self._other.feed(text, index)
            done = self._other.done
        if done:
            self._part = "next"
        return index

    def _accept_name(self) -> None:
        """Accept any name after a tag, or an offered name with arguments without a tag."""
        if not self._name_text or self._string is not None:
            return
        if not self._is_offered():
            self._fail()
        elif not self._untagged or self._arguments is not None:
            self.name = self._name_text

    def _is_offered(self) -> bool:
        return not self._untagged or self._name_text in self._offered

    def _end(self) -> None:
        if self._name_text and self._is_offered():
            self._arguments = self._arguments or Arguments()
            self._arguments.close()
            self.name = self._name_text
            self.state = "done"
        else:
            self.state = "none"

    def _fail(self) -> None:
        """Stop at text that is not JSON. A call that is certain ends there."""
        self.state = "done" if self.name else "none"
