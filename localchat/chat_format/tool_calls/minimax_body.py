"""MiniMax M3's way of writing a tool call: a tag for each value, nested as the values are.

`]<]minimax[>[<invoke name="…">`, then for each key `]<]minimax[>[<key>value]<]minimax[>[</key>`; the values of
a list stand as `item`. A value stands bare, so the tool's schema says whether it is a string.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localchat.chat_format.parser import half
from localchat.chat_format.tool_calls.json_body import SteppedBody

MARK = "]<]minimax[>["
INVOKE = MARK + '<invoke name="'
_TAG = re.compile(re.escape(MARK) + r"<(/?)([^<>]{1,256})>")
_MOST_TAG = 300
_NAME = re.compile(r'invoke name="([^"]+)"\Z')


@dataclass(slots=True)
class _Open:
    """A value that is being written. `kind` is known with its first letter or tag."""

    schema: Mapping[str, Any]
    kind: Literal["", "text", "other", "object", "array"] = ""
    count: int = 0
    said: str = ""


class NestedBody(SteppedBody):
    """A call from its `invoke` on. `schemas`: the parameters of each tool that was offered, by its name."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(schemas)
        self._levels: list[_Open] = []

    def finish(self) -> None:
        if self.state == "open" and not self.name:
            self.state = "none"

    def _step(self) -> bool:
        """One tag, with the text before it; False: more text is needed."""
        at = self._held.find(MARK)
        if at < 0:
            border = half(self._held, (MARK,))
            self._say(self._held[:border])
            self._held = self._held[border:]
            return False
        self._say(self._held[:at])
        self._held = self._held[at:]
        found = _TAG.match(self._held)
        if found is None:
            if len(self._held) <= _MOST_TAG and ">" not in self._held[len(MARK) :]:
                return False
            if not self.name:
                self.state = "none"
                return False
            self._say(MARK)  # the mark, and no tag
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
        self.name, self._held = named.group(1), self._held[end:]
        self._levels.append(_Open(self._schemas.get(self.name, {}), "object"))
        self._out.append("{")
        return True

    def _open(self, tag: str) -> None:
        above = self._levels[-1]
        if above.kind in ("", "other"):
            listed = tag == "item" and above.schema.get("type") != "object"
            above.kind = "array" if listed else "object"
            self._out.append("[" if listed else "{")
        elif above.kind == "text":
            above.said += MARK + f"<{tag}>"
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
        self._levels.append(_Open(schema))

    def _say(self, text: str) -> None:
        if not text or not self._levels:
            return
        one = self._levels[-1]
        if one.kind == "" and _is_text(one.schema):
            one.kind = "text"
            self._out.append('"')
        if one.kind == "text":
            self._out.append(_json(text))
        elif one.kind in ("", "other"):
            one.said += text
            if one.said.strip():
                one.kind = "other"

    def _close(self) -> None:
        one = self._levels.pop()
        if one.kind == "text":
            self._out.append('"')
        elif one.kind in ("object", "array"):
            self._out.append("}" if one.kind == "object" else "]")
        else:
            self._out.append(_typed(one.said) if one.kind else _nothing(one.schema))
        if not self._levels:
            self.state = "done"


def _of(properties: object, key: str) -> Mapping[str, Any]:
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _is_text(schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("type") == "string")


def _nothing(schema: Mapping[str, Any]) -> str:
    """JSON text of a value that has nothing between its tags."""
    kind = schema.get("type")
    return {"array": "[]", "object": "{}"}.get(kind, '""') if isinstance(kind, str) else '""'


def _typed(said: str) -> str:
    """JSON text of a value that is no string by its schema, or of which it says nothing."""
    bare = said.strip()
    try:
        return json.dumps(json.loads(bare), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(said, ensure_ascii=False)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
