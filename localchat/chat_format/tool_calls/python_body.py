"""Body of a tool call that begins with the name, with arguments in one of several notations."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from localchat.chat_format.tool_calls.family import BARE
from localchat.chat_format.tool_calls.json_body import Arguments, State
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
_ODD = re.compile(r"""\s*[\w.:/-]*(["'=;,!?]|[ \t]+[^\W_])""")


class NameFirstBody:
    """Reads a name, then its arguments in one of several notations.

    `name[ARGS]{…}`, `function<｜tool▁sep｜>name`, `functions.name:0<|tool_call_argument_begin|>{…}`, a fence
    around the arguments; `name(key=value)` as in Python; `call:name{key:value}` as Gemma writes it; a tag for
    each argument. schemas: parameters of the offered tools by name. splits, naming, closes: see ToolCallFamily.
    bare: it has no tag, so only an offered name with keyword arguments makes it a call.
    """

    def __init__(
        self,
        schemas: Mapping[str, Mapping[str, Any]],
        splits: Sequence[str],
        *,
        naming: Sequence[str] = (),
        closes: Sequence[str] = (),
        bare: bool = False,
    ) -> None:
        self.state: State = "open"
        self.name = ""
        self._schemas = schemas
        self._splits = splits
        self._naming = naming
        self._bare = bare
        self._marks = ("{", "(", *closes, *(syntax.key[0] for syntax in BARE))
        self._header = ""
        self._print_prefix = ""
        self._arguments: Arguments | PythonObject | XmlBody = Arguments()

    def feed(self, text: str) -> str:
        if self.name:
            return self._feed_arguments(text)
        whole = self._header + text
        self._header = ""
        if self._bare and not self._may_be_offered(whole):
            return self._reject(whole)
        if _ODD.match(whole):
            return self._reject(whole)
        at = min((at for mark in self._marks if (at := whole.find(mark)) >= 0), default=-1)
        self._header = whole if at < 0 else whole[:at]
        if at < 0 and len(whole) <= _MAX_HEADER:
            return ""
        if at < 0 or len(self._header) > _MAX_HEADER:
            return self._reject(whole)
        return self._decide(whole, at)

    def _may_be_offered(self, whole: str) -> bool:
        """Whether this begins with the name of an offered tool, or may still become one."""
        begun = whole.lstrip()
        return any(name.startswith(begun) or begun.startswith(name) for name in self._schemas)

    def _reject(self, whole: str) -> str:
        self.state = "none"
        return self._print_prefix + whole

    def _decide(self, whole: str, at: int) -> str:
        """End the header: the arguments begin at `at`."""
        rest = whole[at:]
        name = self._name_in_header()
        if rest[0] == "(" and name == _PRINT and not self._print_prefix:
            self._print_prefix = whole[: at + 1]
            self._header = ""
            return self.feed(rest[1:])
        syntax = next((syntax for syntax in BARE if rest.startswith(syntax.key[0])), None)
        if not name or (self._bare and not self._is_keyword_call(name, rest)):
            if (
                self._bare
                and name in self._schemas
                and _MAY_BE_KEYWORD_CALL.match(rest)
                and len(whole) < _MAX_HEADER
            ):
                self._header = whole
                return ""
            return self._reject(whole)
        if syntax is not None:
            self._arguments = XmlBody(syntax, self._schemas)
            self._arguments.set_name(name)
        elif rest[0] == "(":
            self._arguments = PythonObject(call=True, order=self._order(name))
            rest = rest[1:]
        elif rest[0] == "{":
            if self._header.lstrip().startswith(_GEMMA):
                self._arguments = PythonObject(call=False)
                rest = rest[1:]
        elif name in self._schemas:
            self._finish_without_arguments(name)
            return rest
        else:
            return self._reject(whole)
        self.name = name
        return self._feed_arguments(rest)

    def _is_keyword_call(self, name: str, rest: str) -> bool:
        """Whether a call without a tag is `name()` or `name(key=…)`."""
        return name in self._schemas and bool(_KEYWORD_CALL.match(rest))

    def _order(self, name: str) -> list[str]:
        found = self._schemas.get(name, {}).get("properties", {})
        return list(found) if isinstance(found, Mapping) else []

    def _feed_arguments(self, text: str) -> str:
        inner = self._arguments
        if isinstance(inner, Arguments):
            rest = text[inner.feed(text) :]
            done = inner.done
        elif isinstance(inner, PythonObject):
            rest = inner.feed(text)
            done = inner.done
        else:
            rest = inner.feed(text)
            done = inner.state != "open"
        if done:
            self.state = "done"
            rest = rest.removeprefix(")") if self._print_prefix else rest
        return rest

    def arguments(self) -> str:
        if not self.name:
            return ""
        inner = self._arguments
        if isinstance(inner, XmlBody):
            return inner.arguments()
        return inner.take()

    def finish(self) -> None:
        if self.state != "open":
            return
        if self.name:
            if isinstance(self._arguments, XmlBody):
                self._arguments.finish()
            return
        name = self._name_in_header()
        if name and any(tag in self._header for tag in self._splits):
            self._finish_without_arguments(name)
        else:
            self.state = "none"

    @property
    def in_python_list(self) -> bool:
        """Whether another call may follow without a tag, as in a Python list."""
        return isinstance(self._arguments, PythonObject)

    def _finish_without_arguments(self, name: str) -> None:
        """End a call without arguments."""
        assert isinstance(self._arguments, Arguments)
        self._arguments.close()
        self.name = name
        self.state = "done"

    def _name_in_header(self) -> str:
        """Name in the text before the arguments; empty if there is none."""
        header = _FENCE.sub("", self._header)
        for tag in self._naming:
            header = header.rpartition(tag)[2]
        for tag in self._splits:
            header = header.replace(tag, "\0")
        words = [word.strip() for word in header.split("\0")]
        words = [word for word in words if word]
        # DeepSeek writes the kind of tool first, Mistral an id after the name.
        name = words[1] if len(words) > 1 and words[0] == "function" else next(iter(words), "")
        name = name.removeprefix(_GEMMA)
        if name not in self._schemas and (found := _KIMI_ID.match(name)):
            name = found.group(1)
        if name not in self._schemas and name.rpartition(".")[2] in self._schemas:
            name = name.rpartition(".")[2]
        return name if _NAME.match(name) else ""
