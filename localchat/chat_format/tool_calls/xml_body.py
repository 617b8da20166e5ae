"""Body of a tool call with a tag for each argument (TagSyntax).

Values have no quotes, so the tool's schema decides between string and JSON. Some families declare the type
beside the key.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any, Literal

from localchat.chat_format.parser import find_first, partial_tag_start
from localchat.chat_format.tool_calls.family import TagSyntax
from localchat.chat_format.tool_calls.json_body import JsonObject, State

_MAX_NAME = 256
_MAX_PYTHON = 2_000
_PYTHON = {"True": True, "False": False, "None": None}
_DECLARES_TEXT = 'string="true"'
_DECLARES_OTHER = 'string="false"'


class XmlBody:
    """Reads a call, starting with its first tag, or with its name if the name has no tag.

    `_step` moves text from `_buffer` to `_out`. It returns False if it needs more text.
    """

    def __init__(self, syntax: TagSyntax, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """schemas: parameters of the offered tools by name."""
        self.state: State = "open"
        self.name = ""
        self._schemas = schemas
        self._buffer = ""
        self._out: list[str] = []
        self._syntax = syntax
        self._quoted = syntax.name[0].endswith('"')
        self._end = syntax.value[1].strip()
        # Models sometimes forget the closing tag of a value.
        self._ends: tuple[str, ...] = (self._end, f"\n{syntax.key[0]}", f"\n{syntax.end}")
        if syntax.padded:
            self._ends += ("</tool_call>", "</parameter>")
        self._part: Literal["name", "between", "key", "opening", "value", "object"] = "name"
        self._key = ""
        self._at_value_start = False
        self._shielded = False
        self._streams = False
        self._count = 0
        self._object = JsonObject()

    def feed(self, text: str) -> str:
        """See CallBody."""
        self._buffer += text
        while self.state == "open" and self._step():
            pass
        if self.state == "open":
            return ""
        remaining = self._buffer
        self._buffer = ""
        return remaining

    @property
    def arguments(self) -> str:
        """See CallBody."""
        return "".join(self._out)

    def finish(self) -> None:
        if self.state != "open":
            return
        if self._part == "name":
            self.state = "none"
        elif self._part == "between":
            self._close()

    def _step(self) -> bool:
        """Read the next part of the buffer. Return False if more text is needed."""
        match self._part:
            case "name":
                return self._name()
            case "between":
                return self._between()
            case "key":
                return self._read_key()
            case "opening":
                return self._begin_value()
            case "value":
                return self._value()
            case "object":
                return self._object_arguments()

    def _head(self, close: str) -> tuple[str, str] | None:
        """Read the content of a tag and its other attributes. None if the tag is incomplete."""
        mark = close[close.rfind('"') + 1 :] if self._quoted else close
        content, end, remaining = self._buffer.partition(mark)
        if not end:
            return None
        self._buffer = remaining
        if not self._quoted:
            return content.strip().strip('"'), ""
        name, _, attributes = content.partition('"')
        return name.strip(), attributes

    def _name(self) -> bool:
        syntax = self._syntax
        text = self._buffer
        self._buffer = text.removeprefix(syntax.name[0])
        head = self._head(syntax.name[1])
        length = len(text) - len(self._buffer) if head else len(text)
        content = text[len(syntax.name[0]) : length]
        if (head and not head[0]) or "\n" in content or len(content) > _MAX_NAME:
            self.state = "none"
        if head is None or self.state == "none":
            self._buffer = text
            return False
        self.name = head[0]
        self._part = "between"
        return True

    def set_name(self, name: str) -> None:
        """Start after the name, which the caller has read."""
        self.name = name
        self._part = "between"

    def _between(self) -> bool:
        syntax = self._syntax
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        if self._buffer.startswith(syntax.key[0]):
            self._buffer = self._buffer[len(syntax.key[0]) :]
            self._part = "key"
            return True
        if self._buffer.startswith("{") and not self._count:
            self._part = "object"
            return True
        if self._buffer.startswith(syntax.end):
            self._buffer = self._buffer[len(syntax.end) :]
            self._close()
        elif not any(tag.startswith(self._buffer) for tag in (syntax.key[0], syntax.end)):
            self._close()
        return False

    def _close(self) -> None:
        self._out.append("}" if self._count else "{}")
        self.state = "done"

    def _object_arguments(self) -> bool:
        """Read arguments that are a JSON object, and the closing tag."""
        if not self._out:
            end = self._object.feed(self._buffer)
            self._buffer = self._buffer[end:]
            if not self._object.closed:
                if self._object.done:
                    self.state = "none"
                return False
            self._out.append(self._object.text)
        tag = self._syntax.end
        text = self._buffer.lstrip()
        if text.startswith(tag):
            self._buffer = text[len(tag) :]
        elif not text or tag.startswith(text):
            return False
        self.state = "done"
        return False

    def _read_key(self) -> bool:
        head = self._head(self._syntax.key[1])
        if head is None:
            return False
        self._key, attributes = head
        separator = ", " if self._count else "{"
        self._out.append(f"{separator}{json.dumps(self._key, ensure_ascii=False)}: ")
        self._count += 1
        if _DECLARES_TEXT in attributes:
            self._streams = True
        elif _DECLARES_OTHER in attributes:
            self._streams = False
        else:
            self._streams = self._is_string()
        self._part = "opening"
        return True

    def _begin_value(self) -> bool:
        tag = self._syntax.value[0].strip()
        if tag:
            text = self._buffer.lstrip()
            if not text.startswith(tag) and tag.startswith(text):
                return False
            self._buffer = text.removeprefix(tag)
        if self._streams:
            self._out.append('"')
        self._part = "value"
        self._at_value_start = True
        self._shielded = False
        return True

    def _value(self) -> bool:
        padded = self._syntax.padded
        opens, closes = self._syntax.shield
        if self._at_value_start:
            if not self._buffer or (opens != self._buffer and opens.startswith(self._buffer)):
                return False
            if opens and self._buffer.startswith(opens):
                self._buffer = self._buffer[len(opens) :]
                self._shielded = True
            if padded:
                self._buffer = self._buffer.removeprefix("\n")
            self._at_value_start = False
        ends = (closes + self._end,) if self._shielded else self._ends
        index, tag = find_first(self._buffer, ends)
        if tag:
            value = self._buffer[:index]
            self._buffer = self._buffer[index:].removeprefix(ends[0])
            self._part = "between"
            if padded:
                value = value.removesuffix("\n")
            if self._streams:
                self._out.append(_escaped(value) + '"')
            else:
                self._out.append(self._typed(value))
            return True
        if self._streams:
            index = partial_tag_start(self._buffer, ends)
            if padded and index and self._buffer[index - 1] == "\n":
                index -= 1
            self._out.append(_escaped(self._buffer[:index]))
            self._buffer = self._buffer[index:]
        return False

    def _schema(self) -> Mapping[str, Any]:
        properties = self._schemas.get(self.name, {}).get("properties", {})
        schema = properties.get(self._key, {}) if isinstance(properties, Mapping) else {}
        return schema if isinstance(schema, Mapping) else {}

    def _is_string(self) -> bool:
        schema = self._schema()
        if "type" in schema:
            return bool(schema["type"] == "string")
        choices = schema.get("enum")
        if isinstance(choices, list):
            return all(isinstance(choice, str) for choice in choices)
        return not schema

    def _typed(self, value: str) -> str:
        """Return the JSON text of a value that is not, or not only, a string by its schema."""
        text = value.strip()
        if text in _PYTHON:
            return json.dumps(_PYTHON[text])  # `True` or `None`, which some models write
        types = self._schema().get("type")
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            parsed = _python(text) if types in ("object", "array") else None
            if parsed is None:
                return json.dumps(value, ensure_ascii=False)
        if isinstance(types, list) and "string" in types and parsed is not None:
            # The schema allows strings too, so the text is the value.
            return json.dumps(value, ensure_ascii=False)
        return json.dumps(parsed, ensure_ascii=False)


def _python(text: str) -> object:
    """Parse a list or dict in Python's notation, which some templates teach. None for other text."""
    if len(text) > _MAX_PYTHON or text[:1] not in ("{", "["):
        return None
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return value if isinstance(value, list | dict) else None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
