"""Interface of the bodies of tool calls, and the body that is a JSON object.

JsonValue and JsonString read JSON piece by piece and repair what models get wrong: a comma before a closing
bracket, line breaks in strings. They take text in runs, not letter by letter: an argument may be a file of a
million lines.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

BLANKS = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_RUN = re.compile(r'[^"\\]+')
_RUN_AND_ESCAPES = re.compile(r'(?:[^"\\]+|\\["\\/bfnrtu])++')
_BARE = re.compile(r'[^\s"\[\]{},]+')
_MENDED = {code: f"\\u{code:04x}" for code in range(32)} | {10: "\\n", 13: "\\r", 9: "\\t"}
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(slots=True)
class JsonValue:
    """Finds the end of a JSON value and repairs its text.

    A value that is neither object, list nor string ends before a comma, a closing bracket or a blank.
    """

    done: bool = False
    """The value has ended; it takes no more text."""
    _open: list[str] = field(default_factory=list)
    _string: bool = False
    _escape: bool = False
    _scalar: bool = False
    _held: str = ""

    def feed(self, text: str, at: int = 0) -> tuple[str, int]:
        out: list[str] = []
        while at < len(text) and not self.done:
            if self._string:
                at = self._in_string(text, at, out)
            elif self._scalar:
                at = self._in_scalar(text, at, out)
            else:
                at = self._between(text, at, out)
        return "".join(out), at

    def _between(self, text: str, at: int, out: list[str]) -> int:
        character = text[at]
        if character in BLANKS or (character == "," and self._open):
            if self._open:
                self._held += character
            return at + 1
        if character in "}]":
            return self._close(at, out)
        if run := _BARE.match(text, at) if self._open else None:
            out += self._held, run.group()
            self._held = ""
            return run.end()
        if not self._open and character not in '{["':
            self._scalar = True
            return at
        out += self._held, character
        self._held = ""
        if character == '"':
            self._string = True
        else:
            self._open.append(character)
        return at + 1

    def _in_scalar(self, text: str, at: int, out: list[str]) -> int:
        run = _BARE.match(text, at)
        if run is None:
            self.done = text[at] in ",}]" or text[at] in BLANKS
            if not self.done:
                out.append(text[at])
                return at + 1
            return at
        out.append(run.group())
        return run.end()

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        if self._escape:
            self._escape = False
            out.append(_escaped(text[at]))
            return at + 1
        run = _RUN_AND_ESCAPES.match(text, at)
        if run:
            out.append(_mended(run.group()))
            return run.end()
        out.append(text[at])
        if text[at] == "\\":
            self._escape = True
        else:
            self._string = False
            self.done = not self._open
        return at + 1

    def _close(self, at: int, out: list[str]) -> int:
        if not self._open:
            self.done = True
            return at
        # A comma before a closing bracket is dropped; a bracket of the wrong kind was meant to close this one.
        out += self._held.replace(",", ""), _CLOSERS[self._open.pop()]
        self._held = ""
        self.done = not self._open
        return at + 1


class JsonString:
    """Decodes a JSON string after its opening quote; `done` after the closing one."""

    def __init__(self) -> None:
        self.done = False
        self._escape = ""
        self._high = 0

    def feed(self, text: str, at: int = 0) -> tuple[str, int]:
        """Take text from an index on. Returns the decoded text and where it stopped."""
        out: list[str] = []
        while at < len(text) and not self.done:
            if self._escape:
                out.append(self._escaped(text[at]))
            elif run := _RUN.match(text, at):
                out.append(run.group())
                at = run.end()
                continue
            elif text[at] == '"':
                self.done = True
            else:
                self._escape = "\\"
            at += 1
        return "".join(out), at

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


def _mended(text: str) -> str:
    """Escape the control characters of a string."""
    if _CONTROL.search(text):
        return text.translate(_MENDED)
    return text


def _escaped(character: str) -> str:
    """Character after a backslash. If that is no escape of JSON, a literal backslash was meant."""
    if character < " ":
        return _MENDED[ord(character)][1:]
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

_NAMES = ("name", "function", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")
_KNOWN = (*_NAMES, *_ARGUMENTS, "type", "id")


class CallBody(Protocol):
    """Reads one call. Never raises."""

    state: State
    name: str
    """Set once the text can only be a call; arguments come in pieces from then on."""

    def feed(self, text: str) -> str:
        """Take text of the call. Returns the rest once the state is not open, with what was held back."""
        ...

    def arguments(self) -> str:
        """JSON text of the arguments that became certain since the last time."""
        ...

    def finish(self) -> None:
        """End of the answer."""
        ...


class IncrementalBody:
    """CallBody that advances by tokens.

    `_step` takes text from `_held` and puts arguments into `_out`; it returns False if it needs more text.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: parameters of the offered tools by name."""
        self.state: State = "open"
        self.name = ""
        self._schemas = schemas
        self._held = ""
        self._out: list[str] = []

    def feed(self, text: str) -> str:
        """See CallBody."""
        self._held += text
        while self.state == "open" and self._step():
            pass
        if self.state == "open":
            return ""
        left = self._held
        self._held = ""
        return left

    def arguments(self) -> str:
        """See CallBody."""
        out = "".join(self._out)
        self._out.clear()
        return out

    def _step(self) -> bool:
        raise NotImplementedError


class Arguments:
    """JSON text of a call's arguments. Null and nothing become an empty object."""

    def __init__(self) -> None:
        self._value = JsonValue()
        self._plain = False
        self._begun = False
        self._out: list[str] = []

    @property
    def done(self) -> bool:
        return self._value.done

    def feed(self, text: str, at: int = 0) -> int:
        """Take text from an index on. Returns where it stopped."""
        piece, at = self._value.feed(text, at)
        if piece and not self._begun:
            self._begun = True
            self._plain = piece[0] not in "{["
        if piece:
            self._out.append(piece)
        if self._value.done:
            self.close()
        return at

    def take(self) -> str:
        """Text that is certain. A value that is neither object nor list is certain only at its end."""
        if self._plain:
            return ""
        out = "".join(self._out)
        self._out.clear()
        return out

    def close(self) -> None:
        """End of the value."""
        if not self._begun:
            self._begun = True
            self._out = ["{}"]
        elif self._plain:
            decoded = "".join(self._out)
            self._out = ["{}" if decoded == "null" else decoded]
            self._plain = False


class JsonBody:
    """Reads `{"name": "…", "arguments": {…}}`, with keys in any order, and more keys.

    Arguments may be a string that contains JSON; `function` may contain the object of name and arguments.
    offered: names of tools; one of them may also be the key of its own arguments. bare: it has no tag, so only
    an offered name with arguments makes it a call.
    """

    def __init__(self, offered: Sequence[str], *, bare: bool) -> None:
        self.state: State = "open"
        self.name = ""
        self._offered = offered
        self._bare = bare
        self._levels = 0
        self._at: Literal["key", "in key", "colon", "value", "in value", "next"] = "key"
        self._key = ""
        self._name_text = ""
        self._string: JsonString | None = None
        self._other = JsonValue()
        self._arguments: Arguments | None = None

    def feed(self, text: str) -> str:
        at = 0
        while at < len(text) and self.state == "open":
            at = self._step(text, at)
        return text[at:]

    def arguments(self) -> str:
        if not self.name or self._arguments is None:
            return ""
        return self._arguments.take()

    def finish(self) -> None:
        if self.state == "open" and not self.name:
            self.state = "none"

    def _step(self, text: str, at: int) -> int:
        """Advance by one token. Returns where it stopped."""
        character = text[at]
        match self._at:
            case "in key":
                return self._in_key(text, at)
            case "in value":
                return self._in_value(text, at)
            case _ if character in BLANKS:
                pass
            case "value":
                return self._begin_value(text, at)
            case _:
                self._between(character)
        return at + 1

    def _between(self, character: str) -> None:
        at = self._at
        if character == "{" and at == "key" and not self._levels:
            self._levels = 1
        elif character == '"' and at == "key" and self._levels:
            self._key = ""
            self._string = JsonString()
            self._at = "in key"
        elif character == ":" and at == "colon":
            self._at = "value"
        elif character == "," and at in ("next", "key") and self._levels:
            self._at = "key"
        elif character == "}" and at in ("next", "key") and self._levels:
            self._levels = self._levels - 1
            self._at = "next"
            if not self._levels:
                self._end()
        else:
            self._fail()

    def _in_key(self, text: str, at: int) -> int:
        assert self._string is not None
        decoded, at = self._string.feed(text, at)
        self._key += decoded
        if self._string.done:
            self._string = None
            self._at = "colon"
            if self._bare and self._key not in _KNOWN:
                self._fail()  # some other object: its text need not wait for its end
        return at

    def _begin_value(self, text: str, at: int) -> int:
        self._at = "in value"
        self._other = JsonValue()
        character = text[at]
        if self._key == "function" and character == "{":
            self._levels = self._levels + 1
            self._at = "key"
            return at + 1
        if self._names_itself(character):
            self._name_text = self._key
            self._key = _ARGUMENTS[0]
        if self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = Arguments()
            self._accept_name()
        elif self._key not in _NAMES or self._name_text:
            self._key = ""
        if self._key and character == '"':
            self._string = JsonString()
            return at + 1
        return at

    def _names_itself(self, character: str) -> bool:
        """Whether the key is the name, as in `{"tool": {…}}`."""
        return (
            character == "{"
            and not self._name_text
            and not self._bare
            and self._key in self._offered
        )

    def _in_value(self, text: str, at: int) -> int:
        arguments = self._arguments if self._key in _ARGUMENTS else None
        if self._string is not None:
            decoded, at = self._string.feed(text, at)
            if arguments is None:
                self._name_text += decoded
            else:
                arguments.feed(decoded)
            if self._string.done:
                self._string = None
                self._at = "next"
                if arguments is not None:
                    arguments.close()
                self._accept_name()
            return at
        if arguments is not None:
            at = arguments.feed(text, at)
            done = arguments.done
        else:
            _, at = self._other.feed(text, at)
            done = self._other.done
        if done:
            self._at = "next"
        return at

    def _accept_name(self) -> None:
        """Accept the name: any after a tag, elsewhere an offered one with arguments."""
        if not self._name_text or self._string is not None:
            return
        if not self._is_offered():
            self._fail()
        elif not self._bare or self._arguments is not None:
            self.name = self._name_text

    def _is_offered(self) -> bool:
        return not self._bare or self._name_text in self._offered

    def _end(self) -> None:
        if self._name_text and self._is_offered():
            self._arguments = self._arguments or Arguments()
            self._arguments.close()
            self.name = self._name_text
            self.state = "done"
        else:
            self.state = "none"

    def _fail(self) -> None:
        """Stop at text that is not JSON: it ends a call that is certain."""
        self.state = "done" if self.name else "none"
