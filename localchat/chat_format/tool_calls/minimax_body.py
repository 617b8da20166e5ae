"""Body of MiniMax M3's tool calls: a tag for each value, nested as the values are.

`]<]minimax[>[<invoke name="…">`, then for each key `]<]minimax[>[<key>value]<]minimax[>[</key>`; the values of
a list are tagged `item`. Values have no quotes, so the tool's schema decides whether one is a string.
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
    """Value whose closing tag has not come yet."""

    schema: Mapping[str, Any]
    kind: Literal["", "text", "other", "object", "array"] = ""
    """Known from its first letter or tag on."""
    count: int = 0
    text: str = ""


class MinimaxBody(IncrementalBody):
    """Reads a call from its `invoke` on."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(schemas)
        self._levels: list[_OpenValue] = []

    def finish(self) -> None:
        if self.state == "open" and not self.name:
            self.state = "none"

    def _step(self) -> bool:
        """Advance by one tag and the text before it; False if more text is needed."""
        at = self._held.find(MARK)
        if at < 0:
            border = partial_tag_start(self._held, (MARK,))
            self._add_text(self._held[:border])
            self._held = self._held[border:]
            return False
        self._add_text(self._held[:at])
        self._held = self._held[at:]
        found = _TAG.match(self._held)
        if found is None:
            if len(self._held) <= _MAX_TAG and ">" not in self._held[len(MARK) :]:
                return False
            if not self.name:
                self.state = "none"
                return False
            self._add_text(MARK)  # the mark, and no tag
            self._held = self._held[len(MARK) :]
            return True
        closes, tag = found.groups()
        if not self.name:
            return self._begin(tag, found.end())
        self._held = self._held[found.end() :]
        if closes:
            self._close()
        else:
            self._open(tag)
        return True

    def _begin(self, tag: str, end: int) -> bool:
        named = _NAME.match(tag)
        if named is None:
            self.state = "none"
            return False
        self.name = named.group(1)
        self._held = self._held[end:]
        self._levels.append(_OpenValue(self._schemas.get(self.name, {}), "object"))
        self._out.append("{")
        return True

    def _open(self, tag: str) -> None:
        above = self._levels[-1]
        if above.kind in ("", "other"):
            listed = tag == "item" and above.schema.get("type") != "object"
            above.kind = "array" if listed else "object"
            self._out.append("[" if listed else "{")
        elif above.kind == "text":
            above.text += MARK + f"<{tag}>"
            self._out.append(_json(MARK + f"<{tag}>"))
            return
        self._out.append(", " if above.count else "")
        above.count += 1
        if above.kind == "object":
            self._out.append(json.dumps(tag, ensure_ascii=False) + ": ")
            schema = _of(above.schema.get("properties"), tag)
        else:
            items = above.schema.get("items")
            schema = items if isinstance(items, Mapping) else {}
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
        else:
            self._out.append(_typed(value.text) if value.kind else _nothing(value.schema))
        if not self._levels:
            self.state = "done"


def _of(properties: object, key: str) -> Mapping[str, Any]:
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _is_text(schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("type") == "string")


def _nothing(schema: Mapping[str, Any]) -> str:
    """JSON text of a value with nothing between its tags."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return {"array": "[]", "object": "{}"}.get(kind, '""')
    return '""'


def _typed(text: str) -> str:
    """JSON text of a value that is not a string by its schema, or has no schema."""
    bare = text.strip()
    try:
        return json.dumps(json.loads(bare), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
