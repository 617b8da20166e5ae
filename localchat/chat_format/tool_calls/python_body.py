"""Body of a tool call that starts with the name."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from localchat.chat_format.parser import find_first
from localchat.chat_format.tool_calls.family import NAME_FIRST
from localchat.chat_format.tool_calls.json_body import JsonObject, State
from localchat.chat_format.tool_calls.python_literals import PythonObject
from localchat.chat_format.tool_calls.xml_body import XmlBody

_MAX_HEADER = 256
_NAME = re.compile(r"[\w.:/-]{1,128}\Z")
_FENCE = re.compile(r"`{3}\w*")
_KIMI_ID = re.compile(r"functions\.(.+):\d+\Z")
_KEYWORD_CALL = re.compile(r"\(\s*(\)|[^\W\d]\w*\s*=[^=])")
_MAY_BE_KEYWORD_CALL = re.compile(r"\(\s*([^\W\d]\w*\s*=?)?\Z")
_GEMMA = "call:"
_PRINT = "print"
_NOT_A_CALL = re.compile(r"""\s*[\w.:/-]*(["'=;,!?]|[ \t]+[^\W_])""")


class NameFirstBody:
    """Reads a name, then its arguments in one of several notations.

    - JSON: `name[ARGS]{…}`, `function<｜tool▁sep｜>name`, `functions.name:0<|tool_call_argument_begin|>{…}`,
      also with a fence around the arguments
    - Python: `name(key=value)`
    - Gemma: `call:name{key:value}`
    - a tag for each argument
    """

    def __init__(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        separators: Sequence[str],
        *,
        closes: Sequence[str] = (),
        untagged: bool = False,
    ) -> None:
        """schemas: parameters of the offered tools by name. Tags: see ToolCallFamily.

        untagged: the call has no tag, so it needs an offered name with keyword arguments.
        """
        self.state: State = "open"
        self.name = ""
        self._schemas = schemas
        self._separators = separators
        self._untagged = untagged
        self._marks = ("{", "(", *closes, *(syntax.key[0] for syntax in NAME_FIRST))
        self._header = ""
        self._print_prefix = ""
        self._arguments: JsonObject | PythonObject | XmlBody = JsonObject()
        self._has_arguments = True

    def feed(self, text: str) -> str:
        if self.name:
            return self._feed_arguments(text)
        text = self._header + text
        self._header = ""
        if self._untagged and not self._may_be_offered(text):
            return self._reject(text)
        if _NOT_A_CALL.match(text):
            return self._reject(text)
        index, mark = find_first(text, self._marks)
        if not mark:
            if len(text) > _MAX_HEADER:
                return self._reject(text)
            self._header = text
            return ""
        if index > _MAX_HEADER:
            return self._reject(text)
        self._header = text[:index]
        return self._decide(text, index)

    def _may_be_offered(self, text: str) -> bool:
        """Whether the text starts with an offered name, or is the start of one."""
        text = text.lstrip()
        return any(name.startswith(text) or text.startswith(name) for name in self._schemas)

    def _reject(self, text: str) -> str:
        self.state = "none"
        return self._print_prefix + text

    def _decide(self, text: str, index: int) -> str:
        """Choose the notation of the arguments, which start at `index`."""
        arguments = text[index:]
        name = self._name_in_header()
        if arguments[0] == "(" and name == _PRINT and not self._print_prefix:
            self._print_prefix = text[: index + 1]
            self._header = ""
            return self.feed(arguments[1:])
        syntax = next(
            (syntax for syntax in NAME_FIRST if arguments.startswith(syntax.key[0])), None
        )
        if not name or (self._untagged and not self._is_keyword_call(name, arguments)):
            if (
                self._untagged
                and name in self._schemas
                and _MAY_BE_KEYWORD_CALL.match(arguments)
                and len(text) < _MAX_HEADER
            ):
                self._header = text
                return ""
            return self._reject(text)
        if syntax is not None:
            self._arguments = XmlBody(syntax, self._schemas)
            self._arguments.set_name(name)
        elif arguments[0] == "(":
            self._arguments = PythonObject(call=True, order=self._order(name))
            arguments = arguments[1:]
        elif arguments[0] == "{":
            if self._header.lstrip().startswith(_GEMMA):
                self._arguments = PythonObject(call=False)
                arguments = arguments[1:]
        elif name in self._schemas:
            self._finish_without_arguments(name)
            return arguments
        else:
            return self._reject(text)
        self.name = name
        return self._feed_arguments(arguments)

    def _is_keyword_call(self, name: str, arguments: str) -> bool:
        """Whether a call without a tag is `name()` or `name(key=…)`."""
        return name in self._schemas and bool(_KEYWORD_CALL.match(arguments))

    def _order(self, name: str) -> list[str]:
        properties = self._schemas.get(name, {}).get("properties", {})
        return list(properties) if isinstance(properties, Mapping) else []

    def _feed_arguments(self, text: str) -> str:
        inner = self._arguments
        if isinstance(inner, JsonObject):
            remaining = text[inner.feed(text) :]
            if inner.done:
                self.state = "none"
                if inner.closed:
                    self.state = "done"
        else:
            remaining = inner.feed(text)
            if isinstance(inner, XmlBody):
                self.state = inner.state
            elif inner.done:
                self.state = "done"
        if self.state == "done" and self._print_prefix:
            remaining = remaining.removeprefix(")")
        return remaining

    @property
    def arguments(self) -> str:
        """See CallBody."""
        inner = self._arguments
        if isinstance(inner, XmlBody):
            return inner.arguments
        if self._has_arguments:
            return inner.text
        return "{}"

    def finish(self) -> None:
        if self.state != "open":
            return
        if self.name:
            if isinstance(self._arguments, XmlBody):
                self._arguments.finish()
                self.state = self._arguments.state
            return
        name = self._name_in_header()
        if name and any(tag in self._header for tag in self._separators):
            self._finish_without_arguments(name)
        else:
            self.state = "none"

    @property
    def in_python_list(self) -> bool:
        """Whether another call may follow without a tag, as in a list of Python calls."""
        return isinstance(self._arguments, PythonObject)

    def _finish_without_arguments(self, name: str) -> None:
        self._has_arguments = False
        self.name = name
        self.state = "done"

    def _name_in_header(self) -> str:
        """Return the name in the text before the arguments, or an empty string."""
        header = _FENCE.sub("", self._header)
        for tag in self._separators:
            header = header.replace(tag, "\0")
        fields = [field.strip() for field in header.split("\0") if field.strip()]
        # DeepSeek writes the kind of tool before the name, and Mistral an id after it.
        if len(fields) > 1 and fields[0] == "function":
            del fields[0]
        name = fields[0].removeprefix(_GEMMA) if fields else ""
        if name not in self._schemas and (match := _KIMI_ID.match(name)):
            name = match.group(1)
        if name not in self._schemas and name.rpartition(".")[2] in self._schemas:
            name = name.rpartition(".")[2]
        return name if _NAME.match(name) else ""
