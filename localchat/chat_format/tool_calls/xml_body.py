"""Body of a tool call with a tag for each argument (TagSyntax).

Values have no quotes, so the tool's schema decides between string and JSON; some families declare the type next
to the key.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from localchat.chat_format.parser import find_first, partial_tag_start
from localchat.chat_format.tool_calls.family import TagSyntax
from localchat.chat_format.tool_calls.json_body import Arguments, IncrementalBody

_MAX_NAME = 256
_MAX_PYTHON = 2_000
_PYTHON = {"True": True, "False": False, "None": None}
_DECLARES_TEXT = re.compile(r'\bstring="true"|\btype="string"')
_DECLARES_OTHER = re.compile(r'\bstring="false"|\btype="(?!string")')


class XmlBody(IncrementalBody):
    """Reads a call from its first tag on, or from its name if that has no tag."""

    def __init__(self, syntax: TagSyntax, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(schemas)
        self._syntax = syntax
        self._quoted = syntax.name[0].endswith('"')
        self._end = syntax.value[1].strip()
        self._ends = (
            self._end,
            *(f"\n{syntax.key[0]}", f"\n{syntax.end}", "</tool_call>", "</parameter>")[
                : 4 if syntax.padded else 2
            ],
        )
        self._at: Literal["name", "between", "key", "opening", "value", "object"] = "name"
        self._key = ""
        self._fresh = False
        self._shielded = False
        self._streams = False
        self._count = 0
        self._object = Arguments()

    def finish(self) -> None:
        if self.state != "open":
            return
        if self._at == "name":
            self.state = "none"
        elif self._at == "between":
            self._close()

    def _step(self) -> bool:
        match self._at:
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

    # ------------------------------------------------------------------------ head and tags

    def _head(self, close: str) -> tuple[str, str] | None:
        """Content of a tag and its further attributes; None if its end has not come yet."""
        mark = close[close.rfind('"') + 1 :] if self._quoted else close
        at = self._held.find(mark)
        if at < 0:
            return None
        declared = self._held[:at]
        self._held = self._held[at + len(mark) :]
        if not self._quoted:
            return declared.strip().strip('"'), ""
        name, _, more = declared.partition('"')
        return name.strip(), more

    def _name(self) -> bool:
        syntax = self._syntax
        whole = self._held
        self._held = whole.removeprefix(syntax.name[0])
        found = self._head(syntax.name[1])
        taken = whole[len(syntax.name[0]) : len(whole) - len(self._held) if found else None]
        if (found and not found[0]) or "\n" in taken or len(taken) > _MAX_NAME:
            self.state = "none"
        if found is None or self.state == "none":
            self._held = whole
            return False
        self.name = found[0]
        self._at = "between"
        return True

    def set_name(self, name: str) -> None:
        """Begin after the name, which the caller has read."""
        self.name = name
        self._at = "between"

    def _between(self) -> bool:
        syntax = self._syntax
        self._held = self._held.lstrip()
        if not self._held:
            return False
        if self._held.startswith(syntax.key[0]):
            self._held = self._held[len(syntax.key[0]) :]
            self._at = "key"
            return True
        if self._held.startswith("{") and not self._count:
            self._at = "object"
            return True
        if self._held.startswith(syntax.end):
            self._held = self._held[len(syntax.end) :]
            self._close()
        elif not any(tag.startswith(self._held) for tag in (syntax.key[0], syntax.end)):
            self._close()
        return False

    def _close(self) -> None:
        self._out.append("{}" if not self._count else "}")
        self.state = "done"

    def _object_arguments(self) -> bool:
        """Read arguments that are one JSON object, and the end."""
        if not self._object.done:
            at = self._object.feed(self._held)
            self._held = self._held[at:]
            self._out.append(self._object.take())
            if not self._object.done:
                return False
        end = self._syntax.end
        held = self._held.lstrip()
        if held.startswith(end):
            self._held = held[len(end) :]
        elif not held or end.startswith(held):
            return False
        self.state = "done"
        return False

    def _read_key(self) -> bool:
        found = self._head(self._syntax.key[1])
        if found is None:
            return False
        self._key, more = found
        self._out.append(
            ("{" if not self._count else ", ") + json.dumps(self._key, ensure_ascii=False) + ": "
        )
        self._count += 1
        declared = bool(_DECLARES_TEXT.search(more)), bool(_DECLARES_OTHER.search(more))
        self._streams = declared[0] or (not declared[1] and self._is_string())
        self._at = "opening"
        return True

    def _begin_value(self) -> bool:
        tag = self._syntax.value[0].strip()
        if tag:
            held = self._held.lstrip()
            if not held.startswith(tag):
                if tag.startswith(held):
                    return False
                tag = ""
            self._held = held[len(tag) :]
        if self._streams:
            self._out.append('"')
        self._at = "value"
        self._fresh = True
        self._shielded = False
        return True

    # ------------------------------------------------------------------------ values

    def _value(self) -> bool:
        padded = self._syntax.padded
        opens, closes = self._syntax.shield
        if self._fresh:
            if not self._held or (opens != self._held and opens.startswith(self._held)):
                return False
            if opens and self._held.startswith(opens):
                self._held = self._held[len(opens) :]
                self._shielded = True
            if padded:
                self._held = self._held.removeprefix("\n")
            self._fresh = False
        ends = (closes + self._end,) if self._shielded else self._ends
        at, tag = find_first(self._held, ends)
        if tag:
            value = self._held[:at]
            self._held = self._held[at + len(tag) if tag == ends[0] else at :]
            self._at = "between"
            if padded:
                value = value.removesuffix("\n")
            self._out.append((_escaped(value) + '"') if self._streams else self._typed(value))
            return True
        if self._streams:
            at = partial_tag_start(self._held, ends)
            if padded and at and self._held[at - 1] == "\n":
                at -= 1
            self._out.append(_escaped(self._held[:at]))
            self._held = self._held[at:]
        return False

    # ------------------------------------------------------------------------ schema

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
        """JSON text of a value that is not, or not only, a string by its schema."""
        bare = value.strip()
        if bare in _PYTHON:
            return json.dumps(_PYTHON[bare])
        types = self._schema().get("type")
        try:
            read = json.loads(bare)
        except (ValueError, RecursionError):
            read = _python(bare) if types in ("object", "array") else None
            if read is None:
                return json.dumps(value, ensure_ascii=False)
        wants_text = isinstance(types, list) and "string" in types and read is not None
        return json.dumps(value if wants_text else read, ensure_ascii=False)


def _python(text: str) -> object:
    """Parse a list or dict as Python prints it, which some templates teach; None otherwise."""
    if len(text) > _MAX_PYTHON or text[:1] not in ("{", "["):
        return None
    try:
        read = ast.literal_eval(text)
        json.dumps(read)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return read if isinstance(read, list | dict) else None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
