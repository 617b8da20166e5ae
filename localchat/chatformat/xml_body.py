"""Qwen3-Coder's way of writing a tool call: `<function=name>`, and a tag for each parameter.

A value stands bare between its tags, so the tool's schema must say whether it is a string or JSON.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal

from localchat.chatformat.call_bodies import State
from localchat.chatformat.tags import first, half

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END, _ENDS = "</function>", ("</parameter>", "\n<parameter=", "\n</function>", "</tool_call>")
_MOST_NAME = 128
_PYTHON = {"True": True, "False": False, "None": None}


class XmlBody:
    """A call, `<function=` included. `schemas`: the parameters of each tool that was offered, by its name."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.state: State = "open"
        self.name = ""
        self._schemas = schemas
        self._at: Literal["name", "between", "key", "value"] = "name"
        self._held = ""
        self._key = ""
        self._fresh = False
        self._streams = False
        self._count = 0
        self._out = ""

    def feed(self, text: str) -> int:
        self._held += text
        while self.state == "open" and self._step():
            pass
        if self.state == "open":
            return len(text)
        left, self._held = len(self._held), ""
        return max(0, len(text) - left)

    def arguments(self) -> str:
        out, self._out = self._out, ""
        return out

    def finish(self) -> None:
        if self.state != "open":
            return
        if self._at == "name":
            self.state = "none"
        elif self._at != "value":
            self._close()

    def _step(self) -> bool:
        match self._at:
            case "name":
                return self._name()
            case "between":
                return self._between()
            case "key":
                return self._begin_value()
            case "value":
                return self._value()

    def _name(self) -> bool:
        at = self._held.find(">")
        if at < 0:
            if len(self._held) > _MOST_NAME or "\n" in self._held:
                self.state = "none"
            return False
        self.name = self._held[len(_FUNCTION) : at].strip().strip('"')
        self._held = self._held[at + 1 :]
        self._at = "between"
        if not self.name:
            self.state = "none"
        return True

    def _between(self) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(_PARAMETER):
            self._held, self._at = self._held[len(_PARAMETER) :], "key"
            return True
        if self._held.startswith(_END):
            self._held = self._held[len(_END) :]
            self._close()
        elif not any(tag.startswith(self._held) for tag in (_PARAMETER, _END)):
            self._close()
        return False

    def _close(self) -> None:
        self._out += "{}" if not self._count else "}"
        self.state = "done"

    def _begin_value(self) -> bool:
        at = self._held.find(">")
        if at < 0:
            return False
        self._key = self._held[:at].strip().strip('"')
        self._held = self._held[at + 1 :]
        self._at, self._fresh = "value", True
        self._out += ("{" if not self._count else ", ") + json.dumps(self._key) + ": "
        self._count += 1
        self._streams = self._is_string()
        if self._streams:
            self._out += '"'
        return True

    def _value(self) -> bool:
        if self._fresh:
            if not self._held:
                return False
            self._held = self._held.removeprefix("\n")
            self._fresh = False
        at, tag = first(self._held, _ENDS)
        if tag:
            value = self._held[:at]
            self._held = self._held[at + len(tag) if tag == "</parameter>" else at :]
            self._at = "between"
            value = value.removesuffix("\n")
            self._out += (_escaped(value) + '"') if self._streams else self._typed(value)
            return True
        if self._streams:
            at = half(self._held, _ENDS)
            if at and self._held[at - 1] == "\n":
                at -= 1
            self._out += _escaped(self._held[:at])
            self._held = self._held[at:]
        return False

    # ------------------------------------------------------------------------ what the schema says

    def _schema(self) -> Mapping[str, Any]:
        found = self._schemas.get(self.name, {}).get("properties", {})
        one = found.get(self._key, {}) if isinstance(found, Mapping) else {}
        return one if isinstance(one, Mapping) else {}

    def _is_string(self) -> bool:
        schema = self._schema()
        if "type" in schema:
            return bool(schema["type"] == "string")
        choices = schema.get("enum")
        if isinstance(choices, list):
            return all(isinstance(choice, str) for choice in choices)
        return not schema

    def _typed(self, value: str) -> str:
        """JSON text of a value that is no string by its schema, or may be none."""
        bare = value.strip()
        if bare in _PYTHON:
            return json.dumps(_PYTHON[bare])
        try:
            read = json.loads(bare)
        except (ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)
        types = self._schema().get("type")
        wants_text = isinstance(types, list) and "string" in types and read is not None
        return json.dumps(value if wants_text else read, ensure_ascii=False)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
