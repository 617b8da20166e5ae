"""JSON text as a model writes it, piece by piece: where a value ends, and the same value in sound JSON.

Models leave a comma before a closing bracket and put line breaks into strings; both are mended on the way.
Text is taken in runs, not letter by letter: an argument may be a file of a million lines.
"""

import re
from dataclasses import dataclass, field

BLANKS = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_RUN = re.compile(r'[^"\\]+')
_RUN_AND_ESCAPES = re.compile(r'(?:[^"\\]+|\\["\\/bfnrtu])++')
_BARE = re.compile(r'[^\s"\[\]{},]+')
_MENDED = {code: f"\\u{code:04x}" for code in range(32)} | {10: "\\n", 13: "\\r", 9: "\\t"}
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(slots=True)
class JsonValue:
    """One value. `feed` takes text from a place on, and gives what is certain of the mended text, and where it
    stopped; `done` is true behind the value's last character. A value that is neither object, list nor string
    ends before a comma, a closing bracket or a blank, which is not taken. It takes nothing behind its end."""

    done: bool = False
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
        # A comma before a closing bracket goes; a bracket of the wrong kind was meant to close this one.
        out += self._held.replace(",", ""), _CLOSERS[self._open.pop()]
        self._held = ""
        self.done = not self._open
        return at + 1


class JsonString:
    """What a JSON string says, decoded as it comes. `done` behind the closing quote; the opening one was
    taken before."""

    def __init__(self) -> None:
        self.done = False
        self._escape = ""
        self._high = 0

    def feed(self, text: str, at: int = 0) -> tuple[str, int]:
        """What is said from a place on, and where it stopped."""
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


def _mended(text: str) -> str:
    """Text of a string, with its control characters escaped."""
    return text.translate(_MENDED) if _CONTROL.search(text) else text


def _escaped(character: str) -> str:
    """What stands behind a backslash; the backslash of no escape of JSON's was meant as one."""
    if character < " ":
        return _MENDED[ord(character)][1:]
    return character if character in '"\\/bfnrtu' else "\\" + character


def _hex(digits: str) -> int:
    try:
        return int(digits, 16)
    except ValueError:
        return 0xFFFD
