"""Converts streamed objects in Python's or Gemma's notation to JSON text.

Keys may lack quotes, strings may have any quotes, and surplus commas are ignored. `True` and `None` become JSON
constants. An expression such as `date(2024, 1, 2)` or `a + b` becomes a string, so that one argument does not
spoil the whole call.
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

from localchat.chat_format.parser import partial_tag_start

_Kind: TypeAlias = Literal["call", "dict", "list"]

_QUOTES = ('"""', "'''", '<|"|>', '"', "'")
_KEYWORD = re.compile(r"([^\W\d]\w*)\s*=(?!=)")
_PARTIAL_KEYWORD = re.compile(r"[^\W\d]\w*\s*=?\Z")
_RUN = re.compile(r"""[^,()\[\]{}'"<:]+""")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?\Z")
_ESCAPE = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_PARTIAL_ESCAPE = re.compile(r"[xuU][0-9a-fA-F]*")
_MAX_ESCAPE = 9
_OCTAL_DIGITS = 3
_STRING_RUNS = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_JSON_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null", "": "null"}
_MAX_LITERAL = 400
_OPENERS = "([{"
_CLOSERS = ")]}"


class PythonObject:
    """Reads an object from its opening bracket to the closing one."""

    def __init__(self, *, call: bool, order: Sequence[str] = ()) -> None:
        """call: keys are written `key=`, as in a Python call. order: keys of the positional arguments."""
        self.done = False
        self._order = order
        self._levels: list[tuple[_Kind, str]] = [("call" if call else "dict", "}")]
        self._state: Literal["item", "value", "string", "raw", "after"] = "item"
        self._buffer = ""
        self._raw = ""
        self._raw_levels = 0
        self._raw_quote = ""
        self._dropped = False
        self._quote = ""
        self._is_key = False
        self._open_string = False
        self._counts = [0]
        self._out = ["{"]

    def take(self) -> str:
        """Return the JSON text that became certain since the last call."""
        out = "".join(self._out)
        self._out.clear()
        return out

    def feed(self, text: str) -> str:
        """Add text, and return the text after the object's end."""
        self._buffer += text
        while self._buffer and not self.done and self._step():
            pass
        if not self.done:
            return ""
        remaining = self._buffer
        self._buffer = ""
        return remaining

    def _step(self) -> bool:
        """Read one token. Return False if more text is needed."""
        if self._state == "string":
            return self._in_string()
        if self._state == "raw":
            return self._in_raw()
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if self._state == "after":
            return self._after()
        return self._item()

    def _item(self) -> bool:
        """Start an item, or the value after a key."""
        text = self._buffer
        starts_item = self._state == "item"
        if starts_item and text[0] in _CLOSERS:
            return self._close()
        if starts_item and text[0] == ",":
            self._buffer = text[1:]
            return True
        if any(quote.startswith(text) and quote != text for quote in _QUOTES) and len(text) < 5:
            return False
        kind = self._levels[-1][0]
        if starts_item and kind == "call":
            if match := _KEYWORD.match(text):
                if match.end() == len(text):
                    # A second `=` may follow.
                    return False
                self._key(match.group(1))
                self._buffer = text[match.end() :]
                self._state = "value"
                return True
            if _PARTIAL_KEYWORD.match(text):
                return False
            index = self._counts[-1]
            self._key(self._order[index] if index < len(self._order) else f"argument_{index + 1}")
        elif starts_item:
            self._separate()
        self._is_key = starts_item and kind == "dict"
        return self._begin(text)

    def _separate(self) -> None:
        """Count an item, and write a comma before all but the first."""
        if self._counts[-1]:
            self._out.append(", ")
        self._counts[-1] += 1

    def _key(self, name: str) -> None:
        self._separate()
        self._out.append(json.dumps(name, ensure_ascii=False) + ": ")

    def _begin(self, text: str) -> bool:
        """Start a key or a value."""
        quote = next((quote for quote in _QUOTES if text.startswith(quote)), "")
        if quote:
            self._buffer = text[len(quote) :]
            self._quote = quote
            self._state = "string"
            if not self._open_string:
                self._out.append('"')
            self._open_string = True
        elif text[0] in _OPENERS and not self._is_key:
            if text[0] == "{":
                self._levels.append(("dict", "}"))
                self._out.append("{")
            else:
                self._levels.append(("list", "]"))
                self._out.append("[")
            self._counts.append(0)
            self._buffer = text[1:]
            self._state = "item"
        else:
            self._begin_raw(dropped=False)
        return True

    def _close(self) -> bool:
        self._out.append(self._levels.pop()[1])
        self._counts.pop()
        self._buffer = self._buffer[1:]
        self._state = "after"
        self.done = not self._levels
        self._is_key = False
        return True

    def _after(self) -> bool:
        """Continue after a key or a value."""
        text = self._buffer
        quotes = tuple(quote for quote in _QUOTES if quote != '<|"|>')
        if self._open_string and text.startswith(quotes):
            if text in ('""', "''"):
                return False
            # Python joins adjacent strings.
            return self._begin(text)
        self._end_string()
        if self._is_key:
            self._is_key = False
            self._out.append(": ")
            if text[0] == ":":
                self._buffer = text[1:]
                self._state = "value"
            else:
                self._out.append("null")
            return True
        if text[0] == ",":
            self._buffer = text[1:]
            self._state = "item"
        elif text[0] in _CLOSERS:
            return self._close()
        else:
            self._begin_raw(dropped=True)
        return True

    def _end_string(self) -> None:
        if self._open_string:
            self._out.append('"')
            self._open_string = False

    def _in_string(self) -> bool:
        if self._quote == '<|"|>':
            return self._in_gemma_string()
        return self._in_python_string(self._buffer, self._quote)

    def _in_gemma_string(self) -> bool:
        text, quote, remaining = self._buffer.partition(self._quote)
        if quote:
            self._out.append(_json(text))
            self._buffer = remaining
            self._state = "after"
            return True
        end = partial_tag_start(self._buffer, (self._quote,))
        self._out.append(_json(self._buffer[:end]))
        self._buffer = self._buffer[end:]
        return False

    def _in_python_string(self, text: str, quote: str) -> bool:
        run = _STRING_RUNS[quote[0]]
        index = 0
        while True:
            if match := run.match(text, index):
                self._out.append(_json(match.group()))
                index = match.end()
            if text.startswith(quote, index):
                self._buffer = text[index + len(quote) :]
                self._state = "after"
                return True
            ahead = text[index : index + 1 + _MAX_ESCAPE]
            if ahead[:1] == "\\" and not _is_open(ahead[1:]):
                escape, length = _unescaped(ahead[1:])
                if len(escape) == 1 and "\ud800" <= escape < "\ue000":
                    # JSON can express half of a surrogate pair only as an escape.
                    self._out.append(f"\\u{ord(escape):04x}")
                else:
                    self._out.append(_json(escape))
                index += 1 + length
            elif not ahead or ahead[0] == "\\" or quote.startswith(ahead):
                self._buffer = text[index:]
                return False
            else:
                # A single quote inside triple quotes is text.
                self._out.append(_json(ahead[0]))
                index += 1

    def _begin_raw(self, *, dropped: bool) -> None:
        """Start text without quotes. dropped: it follows a value, like `+ 1`, and is ignored."""
        self._raw = ""
        self._raw_levels = 0
        self._raw_quote = ""
        self._dropped = dropped
        self._state = "raw"

    def _in_raw(self) -> bool:
        """Read up to a comma, colon or bracket that ends the value."""
        while self._buffer:
            if self._raw_quote:
                end = self._buffer.find(self._raw_quote)
                if end < 0:
                    self._move_to_raw(len(self._buffer))
                    return False
                self._move_to_raw(end + 1)
                self._raw_quote = ""
                continue
            if run := _RUN.match(self._buffer):
                self._move_to_raw(run.end())
                continue
            character = self._buffer[0]
            if not self._raw_levels and (
                character in ",)]}" or (character == ":" and self._is_key)
            ):
                return self._emit_raw()
            self._raw_levels += (character in _OPENERS) - (character in _CLOSERS)
            if character in "'\"":
                self._raw_quote = character
            self._move_to_raw(1)
        return False

    def _move_to_raw(self, count: int) -> None:
        self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _emit_raw(self) -> bool:
        raw = self._raw.strip()
        self._raw = ""
        self._state = "after"
        if self._is_key:
            self._out.append(json.dumps(raw, ensure_ascii=False))
        elif not self._dropped:
            self._out.append(_literal(raw))
        return True


def _is_open(escape: str) -> bool:
    """Whether an escape, given without its backslash, may continue after this text."""
    if not escape:
        return True
    if escape[0] not in "xuU01234567" or len(escape) == _MAX_ESCAPE:
        return False
    match = _ESCAPE.match(escape)
    if escape[0] in "xuU":
        return match is None and _PARTIAL_ESCAPE.fullmatch(escape) is not None
    return match is not None and match.end() == len(escape) < _OCTAL_DIGITS


def _unescaped(text: str) -> tuple[str, int]:
    """Decode the Python escape at the start of a text, after its backslash.

    Return the result and its length.
    """
    match = _ESCAPE.match(text)
    if match is None:
        character = text[0]
        if character in "\\'\"":
            return character, 1
        return _ESCAPES.get(character, "\\" + character), 1
    escape = match.group()
    code = int(escape, 8) if escape[0].isdigit() else int(escape[1:], 16)
    return chr(code) if code < 0x110000 else "\ufffd", len(escape)


def _literal(raw: str) -> str:
    """Return the JSON text of a value without quotes."""
    if raw.lower() in _JSON_WORDS:
        return _JSON_WORDS[raw.lower()]
    if _NUMBER.match(raw):
        return raw
    if len(raw) <= _MAX_LITERAL:
        try:
            return json.dumps(ast.literal_eval(raw), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    return json.dumps(raw, ensure_ascii=False)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
