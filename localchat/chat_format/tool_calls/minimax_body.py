"""Body of MiniMax M3's tool calls, with a tag around each value.

A call starts with `]<]minimax[>[<invoke name="…">`. For each key, `]<]minimax[>[<key>value]<]minimax[>[</key>`
follows. Values of a list have the tag `item`. Values have no quotes, so the schema says which ones are strings.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localchat.chat_format.parser import partial_tag_start
from localchat.chat_format.tool_calls.json_body import IncrementalBody

MARK = "]<]minimax[>["
INVOKE = MARK + '<invoke name="'
_TAG = re.compile(re.escape(MARK) + r"<(/?)([^<>]{1,256})>")
_MAX_TAG = 300
_NAME = re.compile(r'invoke name="([^"]+)"\Z')


@dataclass(slots=True)
class _OpenValue:
    """A value before its closing tag."""

    schema: Mapping[str, Any]
    kind: Literal["", "text", "other", "object", "array"] = ""
    """Empty before its first character or tag."""
    count: int = 0
    text: str = ""


class MinimaxBody(IncrementalBody):
    """Reads a call, starting with its `invoke` tag."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(schemas)
        self._levels: list[_OpenValue] = []

    def finish(self) -> None:
        if self.state == "open" and not self.name:
            self.state = "none"

    def _step(self) -> bool:
        """Read one tag and the text before it. Return False if more text is needed."""
        start = self._buffer.find(MARK)
        if start < 0:
            end = partial_tag_start(self._buffer, (MARK,))
            self._add_text(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        self._add_text(self._buffer[:start])
        self._buffer = self._buffer[start:]
        match = _TAG.match(self._buffer)
        if match is None:
            if len(self._buffer) <= _MAX_TAG and ">" not in self._buffer[len(MARK) :]:
                return False
            if not self.name:
                self.state = "none"
                return False
            # The mark is not followed by a tag, so it is text.
            self._add_text(MARK)
            self._buffer = self._buffer[len(MARK) :]
            return True
        closes, tag = match.groups()
        if not self.name:
            return self._begin(tag, match.end())
        self._buffer = self._buffer[match.end() :]
        if closes:
            self._close()
        else:
            self._open(tag)
        return True

    def _begin(self, tag: str, end: int) -> bool:
        match = _NAME.match(tag)
        if match is None:
            self.state = "none"
            return False
        self.name = match.group(1)
        self._buffer = self._buffer[end:]
        self._levels.append(_OpenValue(self._schemas.get(self.name, {}), "object"))
        self._out.append("{")
        return True

    def _open(self, tag: str) -> None:
        parent = self._levels[-1]
        if parent.kind in ("", "other"):
            if tag == "item" and parent.schema.get("type") != "object":
                parent.kind = "array"
                self._out.append("[")
            else:
                parent.kind = "object"
                self._out.append("{")
        elif parent.kind == "text":
            parent.text += MARK + f"<{tag}>"
            self._out.append(_json(MARK + f"<{tag}>"))
            return
        if parent.count:
            self._out.append(", ")
        parent.count += 1
        if parent.kind == "object":
            self._out.append(json.dumps(tag, ensure_ascii=False) + ": ")
            properties = _as_mapping(parent.schema.get("properties"))
            schema = _as_mapping(properties.get(tag))
        else:
            schema = _as_mapping(parent.schema.get("items"))
        self._levels.append(_OpenValue(schema))

    def _add_text(self, text: str) -> None:
        if not text or not self._levels:
            return
        value = self._levels[-1]
        if value.kind == "" and _is_text(value.schema):
            value.kind = "text"
            self._out.append('"')
        if value.kind == "text":
            self._out.append(_json(text))
        elif value.kind in ("", "other"):
            value.text += text
            if value.text.strip():
                value.kind = "other"

    def _close(self) -> None:
        value = self._levels.pop()
        if value.kind == "text":
            self._out.append('"')
        elif value.kind in ("object", "array"):
            self._out.append("}" if value.kind == "object" else "]")
        elif value.kind:
            self._out.append(_typed(value.text))
        else:
            self._out.append(_empty_value(value.schema))
        if not self._levels:
            self.state = "done"


def _as_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_text(schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("type") == "string")


def _empty_value(schema: Mapping[str, Any]) -> str:
    """Return the JSON text of a value without text between its tags."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return {"array": "[]", "object": "{}"}.get(kind, '""')
    return '""'


def _typed(text: str) -> str:
    """Return the JSON text of a value that is not a string by its schema, or has no schema."""
    try:
        return json.dumps(json.loads(text.strip()), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
