"""Converts objects in Python's or Gemma's notation to JSON text, once they are complete.

Gemma's keys have no quotes, and its strings are enclosed in `<|"|>`. `True`, `None` and their JSON names become
JSON constants. An expression such as `date(2024, 1, 2)` becomes a string, so that one argument does not spoil
the whole call.
"""

import ast
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any, Final

from localchat.chat_format.tool_calls.json_body import json_text

_GEMMA_QUOTE: Final = '<|"|>'
_QUOTES: Final = ('"""', "'''", _GEMMA_QUOTE, '"', "'")
_PLAIN: Final = re.compile(r"""[^,()\[\]{}'"<]+""")
_QUOTE_OR_ESCAPE: Final = {
    quote: re.compile(("" if quote == _GEMMA_QUOTE else r"\\.|") + re.escape(quote), re.DOTALL)
    for quote in _QUOTES
}
_KEYWORD: Final = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)")
_BARE_KEY: Final = re.compile(r"([{,]\s*|\A\s*)([^\W\d][\w.-]*)\s*:")
_CONSTANTS: Final = {"true": True, "false": False, "none": None, "null": None}


class PythonObject:
    """Reads an object from its opening bracket to the closing one."""

    def __init__(self, *, call: bool, order: Sequence[str] = ()) -> None:
        """call: keys are written `key=`, as in a Python call. order: keys of the positional arguments."""
        self.done = False
        self._is_call = call
        self._order = order
        self._text = ""
        self._index = 0
        self._depth = 1
        self._quote = ""
        self._items: list[str] = []
        self._item_start = 0
        self.text = ""
        """JSON text of the object, once it is done."""

    def feed(self, text: str) -> str:
        """Add text, and return the text after the object's end."""
        self._text += text
        while not self.done and self._index < len(self._text):
            step = self._in_string if self._quote else self._between_strings
            if not step():
                return ""
        if not self.done:
            return ""
        remaining = self._text[self._index :]
        self._text = ""
        return remaining

    def _in_string(self) -> bool:
        """Find the end of a string. Return False if more text is needed."""
        for match in _QUOTE_OR_ESCAPE[self._quote].finditer(self._text, self._index):
            self._index = match.end()
            if match[0] == self._quote:
                self._quote = ""
                return True
        # The end of the text may be a part of the closing quote, or of an escape.
        end = len(self._text) - len(self._quote) + 1
        if self._text.endswith("\\"):
            end = min(end, len(self._text) - 1)
        self._index = max(self._index, end)
        return False

    def _between_strings(self) -> bool:
        """Read a bracket, a comma, a quote, or the text before one. Return False if more text is needed."""
        text = self._text
        if run := _PLAIN.match(text, self._index):
            self._index = run.end()
            return True
        start = text[self._index : self._index + len(_GEMMA_QUOTE)]
        if any(quote.startswith(start) and quote != start for quote in _QUOTES):
            return False
        self._quote = next((quote for quote in _QUOTES if start.startswith(quote)), "")
        self._index += len(self._quote) or 1
        if start[0] in "([{":
            self._depth += 1
        elif start[0] in ")]}":
            self._depth -= 1
            if not self._depth:
                self._end_item()
                self.text = self._json()
                self.done = True
        elif start[0] == "," and self._depth == 1:
            self._end_item()
        return True

    def _end_item(self) -> None:
        item = self._text[self._item_start : self._index - 1]
        self._item_start = self._index
        if item.strip():
            self._items.append(item)

    def _json(self) -> str:
        values: dict[str, Any] = {}
        for number, item in enumerate(self._items):
            if not self._is_call:
                key, _, source = _as_python(item).partition(":")
                values[str(_value_of(key))] = _value_of(source or "null")
            elif keyword := _KEYWORD.match(item):
                values[keyword[1]] = _value_of(item[keyword.end() :])
            elif number < len(self._order):
                values[self._order[number]] = _value_of(item)
            else:
                values[f"argument_{number + 1}"] = _value_of(item)
        # Python writes emoji as two escapes.
        return json_text(values)


def _as_python(item: str) -> str:
    """Return an item in Gemma's notation as Python's."""
    parts = item.split(_GEMMA_QUOTE)
    parts[::2] = [_BARE_KEY.sub(r'\1"\2":', part) for part in parts[::2]]
    parts[1::2] = map(repr, parts[1::2])
    return "".join(parts)


def _value_of(source: str) -> Any:  # noqa: ANN401 - JSON
    """Return the value of an expression, or its text if it is no literal."""
    source = source.strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backslash that escapes nothing
            return _converted(ast.parse(source, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return source


def _converted(node: ast.expr) -> Any:  # noqa: ANN401 - JSON
    match node:
        case ast.Constant(str() | bool() | int() | None as value):
            return value
        case ast.Constant(float() as value) if math.isfinite(value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.Name(name):
            return _CONSTANTS.get(name.lower(), name)
        case ast.List(items) | ast.Tuple(items) | ast.Set(items):
            return [_converted(item) for item in items]
        case ast.Dict(keys, values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {str(_converted(key)): _converted(value) for key, value in pairs if key}
    return ast.unparse(node)
