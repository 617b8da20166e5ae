"""JSON text as a model writes it, character by character: where a value ends, and the same value in sound JSON.

Models leave a comma before a closing bracket and put line breaks into strings; both are mended on the way.
"""

from dataclasses import dataclass, field

_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_BLANKS = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}


@dataclass(slots=True)
class JsonValue:
    """One value. `push` takes a character and gives what is certain of the mended text; `done` is true behind
    its last character. A value that is neither object, list nor string ends before a comma, a closing bracket
    or a blank, which `push` does not take (`over` is true, the character is the caller's). It takes
    nothing behind its end."""

    done: bool = False
    over: bool = False
    _open: list[str] = field(default_factory=list)
    _string: bool = False
    _escape: bool = False
    _scalar: bool = False
    _held: str = ""

    def push(self, character: str) -> str:
        if self.done:
            return ""
        if self._string:
            return self._in_string(character)
        if self._scalar:
            if character in ",}]" or character in _BLANKS:
                self.done = self.over = True
                return ""
            return character
        if character in _BLANKS:
            if self._open:
                self._held += character
            return ""
        if character == "," and self._open:
            self._held += character
            return ""
        held, self._held = self._held, ""
        if character in "}]":
            return self._close(character, held)
        if character in "{[":
            self._open.append(character)
        elif character == '"':
            self._string = True
        elif not self._open:
            self._scalar = True
        return held + character

    def _in_string(self, character: str) -> str:
        if self._escape:
            self._escape = False
        elif character == "\\":
            self._escape = True
        elif character == '"':
            self._string = False
            self.done = not self._open
        elif character < " ":
            return _CONTROLS.get(character, f"\\u{ord(character):04x}")
        return character

    def _close(self, character: str, held: str) -> str:
        if not self._open:
            self.done = self.over = True
            return ""
        opened = self._open.pop()
        self.done = not self._open
        # A comma before a closing bracket goes; a bracket of the wrong kind was meant to close this one.
        return held.replace(",", "") + _CLOSERS[opened]


class JsonString:
    """What a JSON string says, decoded as it comes. `done` behind the closing quote; the opening one was
    taken before."""

    def __init__(self) -> None:
        self.done = False
        self._escape = ""
        self._high = 0

    def push(self, character: str) -> str:
        if self._escape:
            return self._escaped(character)
        if character == '"':
            self.done = True
            return ""
        if character == "\\":
            self._escape = character
            return ""
        return character

    def _escaped(self, character: str) -> str:
        self._escape += character
        if self._escape.startswith("\\u"):
            if len(self._escape) < 6:
                return ""
            code, self._escape = _hex(self._escape[2:]), ""
            if 0xD800 <= code < 0xDC00:
                self._high = code
                return ""
            if 0xDC00 <= code < 0xE000:
                code = 0x10000 + (((self._high or 0xD800) - 0xD800) << 10) + code - 0xDC00
            self._high = 0
            return chr(code)
        self._escape = ""
        return {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}.get(character, character)


def _hex(digits: str) -> int:
    try:
        return int(digits, 16)
    except ValueError:
        return 0xFFFD
