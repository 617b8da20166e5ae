"""Objects in Python's or Gemma's notation, converted to JSON text as they stream.

Keys may be bare, strings in any quotes, `True` and `None` stand for JSON's words, commas may be too many. A
value that is no literal (`date(2024, 1, 2)`, `a + b`) becomes a string: a call is not lost over one argument.
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
_NO_KEYWORD_YET = re.compile(r"[^\W\d]\w*\s*=?\Z")
_RUN = re.compile(r"""[^,()\[\]{}'"<:]+""")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?\Z")
_ESCAPE = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_BEGUN_ESCAPE = re.compile(r"[xuU][0-9a-fA-F]*")
_LONGEST_ESCAPE = 9
_OCTAL = 3
_STRING_RUNS = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_JSON_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null", "": "null"}
_MAX_LITERAL = 400
_OPENERS = "([{"
_CLOSERS = ")]}"


class PythonObject:
    """Reads an object after its opening bracket, up to the closing one.

    call: the bracket is that of a call, keys are written `key=`, and values without a key get those of `order`.
    """

    def __init__(self, *, call: bool, order: Sequence[str] = ()) -> None:
        self.done = False
        self._order = order
        self._levels: list[tuple[_Kind, str]] = [("call" if call else "dict", "}")]
        self._at: Literal["item", "value", "string", "raw", "after"] = "item"
        self._held = ""
        self._raw = ""
        self._raw_levels = 0
        self._raw_quote = ""
        self._junk = False
        self._quote = ""
        self._is_key = False
        self._open_string = False
        self._counts = [0]
        self._out = ["{"]

    def take(self) -> str:
        """JSON text that became certain since the last time."""
        out = "".join(self._out)
        self._out.clear()
        return out

    def feed(self, text: str) -> str:
        """Take text. Returns the rest after the object's end."""
        self._held += text
        while self._held and not self.done and self._step():
            pass
        if not self.done:
            return ""
        left = self._held
        self._held = ""
        return left

    def _step(self) -> bool:
        """Advance by one token; False if more text is needed."""
        if self._at == "string":
            return self._in_string()
        if self._at == "raw":
            return self._in_raw()
        self._held = self._held.lstrip()
        if not self._held:
            return False
        if self._at == "after":
            return self._after()
        return self._item()

    # ------------------------------------------------------------------------ items

    def _item(self) -> bool:
        """Begin an item, or the value after a key."""
        held = self._held
        kind = self._levels[-1][0]
        if self._at == "item" and held[0] in _CLOSERS:
            return self._close()
        if self._at == "item" and held[0] == ",":
            self._held = held[1:]
            return True
        if any(quote.startswith(held) and quote != held for quote in _QUOTES) and len(held) < 5:
            return False
        if self._at == "item" and kind == "call":
            if found := _KEYWORD.match(held):
                if found.end() == len(held):
                    return False  # another `=` may follow
                self._key(found.group(1))
                self._held = held[found.end() :]
                self._at = "value"
                return True
            if _NO_KEYWORD_YET.match(held):
                return False
            place = self._counts[-1]
            self._key(self._order[place] if place < len(self._order) else f"argument_{place + 1}")
        self._is_key = self._at == "item" and kind == "dict"
        if (self._at == "item" and kind != "call") and self._counts[-1]:
            self._out.append(", ")
        if self._at == "item" and kind != "call":
            self._counts[-1] += 1
        return self._begin(held)

    def _key(self, name: str) -> None:
        self._out.append(
            (", " if self._counts[-1] else "") + json.dumps(name, ensure_ascii=False) + ": "
        )
        self._counts[-1] += 1

    def _begin(self, held: str) -> bool:
        """Begin a key or a value, by its first letters."""
        quote = next((quote for quote in _QUOTES if held.startswith(quote)), "")
        if quote:
            self._held = held[len(quote) :]
            self._quote = quote
            self._at = "string"
            if not self._open_string:
                self._out.append('"')
            self._open_string = True
        elif held[0] in _OPENERS and not self._is_key:
            closer = "}" if held[0] == "{" else "]"
            self._levels.append(("dict" if held[0] == "{" else "list", closer))
            self._counts.append(0)
            self._out.append("{" if held[0] == "{" else "[")
            self._held = held[1:]
            self._at = "item"
        else:
            self._begin_raw(junk=False)
        return True

    def _close(self) -> bool:
        self._out.append(self._levels.pop()[1])
        self._counts.pop()
        self._held = self._held[1:]
        self._at = "after"
        self.done = not self._levels
        self._is_key = False
        return True

    def _after(self) -> bool:
        """Continue after a key or a value."""
        held = self._held
        quotes = tuple(quote for quote in _QUOTES if quote != '<|"|>')
        if self._open_string and held.startswith(quotes):
            if held in ('""', "''"):
                return False
            return self._begin(held)  # Python joins adjacent strings
        self._end_string()
        if self._is_key:
            self._is_key = False
            self._out.append(": ")
            if held[0] == ":":
                self._held = held[1:]
                self._at = "value"
            else:
                self._out.append("null")
            return True
        if held[0] == ",":
            self._held = held[1:]
            self._at = "item"
        elif held[0] in _CLOSERS:
            return self._close()
        else:
            self._begin_raw(junk=True)
        return True

    def _end_string(self) -> None:
        if self._open_string:
            self._out.append('"')
            self._open_string = False

    # ------------------------------------------------------------------------ strings

    def _in_string(self) -> bool:
        held = self._held
        quote = self._quote
        if quote == '<|"|>':
            at = held.find(quote)
            if at >= 0:
                return self._emit_text(at, at + len(quote))
            return self._emit_text(partial_tag_start(held, (quote,)))
        return self._in_python_string(held, quote)

    def _in_python_string(self, held: str, quote: str) -> bool:
        run = _STRING_RUNS[quote[0]]
        at = 0
        while True:
            if found := run.match(held, at):
                self._out.append(_json(found.group()))
                at = found.end()
            if held.startswith(quote, at):
                self._held = held[at + len(quote) :]
                self._at = "after"
                return True
            rest = held[at : at + 1 + _LONGEST_ESCAPE]
            if rest[:1] == "\\" and not _is_open(rest[1:]):
                escape, length = _unescaped(rest[1:])
                half_pair = len(escape) == 1 and "\ud800" <= escape < "\ue000"
                self._out.append(f"\\u{ord(escape):04x}" if half_pair else _json(escape))
                at += 1 + length
            elif not rest or rest[0] == "\\" or quote.startswith(rest):
                self._held = held[at:]
                return False
            else:
                self._out.append(_json(rest[0]))  # a quote inside of three
                at += 1

    def _emit_text(self, at: int, end: int = -1) -> bool:
        """Emit a string up to `at`. `end`: where it closes."""
        self._out.append(_json(self._held[:at]))
        self._held = self._held[at if end < 0 else end :]
        if end < 0:
            return False
        self._at = "after"
        return True

    # ------------------------------------------------------------------------ values without quotes

    def _begin_raw(self, *, junk: bool) -> None:
        """Begin text without quotes. `junk`: it follows a value, as `+ 1` does, and is dropped."""
        self._raw = ""
        self._raw_levels = 0
        self._raw_quote = ""
        self._junk = junk
        self._at = "raw"

    def _in_raw(self) -> bool:
        """Read up to the next comma, colon or bracket that is not part of it."""
        while self._held:
            if self._raw_quote:
                at = self._held.find(self._raw_quote)
                if at < 0:
                    self._raw = self._raw + self._held
                    self._held = ""
                    return False
                self._raw = self._raw + self._held[: at + 1]
                self._held = self._held[at + 1 :]
                self._raw_quote = ""
                continue
            if run := _RUN.match(self._held):
                self._raw, self._held = self._raw + run.group(), self._held[run.end() :]
                continue
            character = self._held[0]
            if not self._raw_levels and (
                character in ",)]}" or (character == ":" and self._is_key)
            ):
                return self._emit_raw()
            self._raw_levels += (character in _OPENERS) - (character in _CLOSERS)
            if character in "'\"":
                self._raw_quote = character
            self._raw = self._raw + character
            self._held = self._held[1:]
        return False

    def _emit_raw(self) -> bool:
        raw = self._raw.strip()
        self._raw = ""
        self._at = "after"
        if self._is_key:
            self._out.append(json.dumps(raw, ensure_ascii=False))
        elif not self._junk:
            self._out.append(_literal(raw))
        return True


def _is_open(rest: str) -> bool:
    """Whether an escape (without its backslash) may continue after this text."""
    if not rest:
        return True
    if rest[0] not in "xuU01234567" or len(rest) == _LONGEST_ESCAPE:
        return False
    found = _ESCAPE.match(rest)
    if rest[0] in "xuU":
        return found is None and _BEGUN_ESCAPE.fullmatch(rest) is not None
    return found is not None and found.end() == len(rest) < _OCTAL


def _unescaped(rest: str) -> tuple[str, int]:
    """Decode a Python escape (without its backslash). Returns the text and the escape's length."""
    found = _ESCAPE.match(rest)
    if found is None:
        return _ESCAPES.get(rest[0], rest[0] if rest[0] in "\\'\"" else "\\" + rest[0]), 1
    escape = found.group()
    code = int(escape, 8) if escape[0].isdigit() else int(escape[1:], 16)
    return chr(code) if code < 0x110000 else "\ufffd", len(escape)


def _literal(raw: str) -> str:
    """JSON text of a value without quotes."""
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
