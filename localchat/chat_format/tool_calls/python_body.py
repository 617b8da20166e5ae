"""A tool call that begins with the name: what follows it shows how the arguments are written."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from localchat.chat_format.tool_calls.family import BARE
from localchat.chat_format.tool_calls.json_body import Arguments, State
from localchat.chat_format.tool_calls.python_literals import LooseValue
from localchat.chat_format.tool_calls.xml_body import TaggedBody

_MOST_HEADER = 256
_NAME = re.compile(r"[\w.:/-]{1,128}\Z")
_FENCE = re.compile(r"`{3}\w*")
_KIMI_ID = re.compile(r"functions\.(.+):\d+\Z")
_KEYED = re.compile(r"\(\s*(\)|[^\W\d]\w*\s*=[^=])")
_MAY_BE_KEYED = re.compile(r"\(\s*([^\W\d]\w*\s*=?)?\Z")
_GEMMA = "call:"
_PRINT = "print"
_ODD = re.compile(r"""\s*[\w.:/-]*(["'=;,!?]|[ \t]+[^\W_])""")


class NamedBody:
    """`name[ARGS]{…}`, `function<｜tool▁sep｜>name`, `functions.name:0<|tool_call_argument_begin|>{…}`, a fence
    around the arguments; `name(key=value)` as Python writes it; `call:name{key:value}` as Gemma does; a name
    and a tag for each argument. `splits`: the tags between. `naming`: those of them behind which the name
    stands. `closes`: tags behind the call. `bare`: it stands without a tag, and only a name of `schemas`, with
    arguments by their keys, makes it a call."""

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
        self._marks = ("{", "(", *closes, *(form.key[0] for form in BARE))
        self._header = ""
        self._passed = ""
        self._inner: Arguments | LooseValue | TaggedBody = Arguments()

    def feed(self, text: str) -> str:
        if self.name:
            return self._argue(text)
        whole, self._header = self._header + text, ""
        if self._bare and not self._may_be_offered(whole):
            return self._none(whole)
        if _ODD.match(whole):
            return self._none(whole)
        at = min((at for mark in self._marks if (at := whole.find(mark)) >= 0), default=-1)
        self._header = whole if at < 0 else whole[:at]
        if at < 0 and len(whole) <= _MOST_HEADER:
            return ""
        if at < 0 or len(self._header) > _MOST_HEADER:
            return self._none(whole)
        return self._decide(whole, at)

    def _may_be_offered(self, whole: str) -> bool:
        """Without a tag: whether this is the beginning of a name that was offered, or begins with one."""
        said = whole.lstrip()
        return any(name.startswith(said) or said.startswith(name) for name in self._schemas)

    def _none(self, whole: str) -> str:
        self.state = "none"
        return self._passed + whole

    def _decide(self, whole: str, at: int) -> str:
        """The header is over: the arguments begin at `at`."""
        rest, name = whole[at:], self._named()
        if rest[0] == "(" and name == _PRINT and not self._passed:
            self._passed, self._header = whole[: at + 1], ""
            return self.feed(rest[1:])
        form = next((form for form in BARE if rest.startswith(form.key[0])), None)
        if not name or (self._bare and not self._is_keyed(name, rest)):
            if (
                self._bare
                and name in self._schemas
                and _MAY_BE_KEYED.match(rest)
                and len(whole) < _MOST_HEADER
            ):
                self._header = whole
                return ""
            return self._none(whole)
        if form is not None:
            self._inner = TaggedBody(form, self._schemas)
            self._inner.named(name)
        elif rest[0] == "(":
            self._inner = LooseValue(call=True, order=self._order(name))
            rest = rest[1:]
        elif rest[0] == "{":
            if self._header.lstrip().startswith(_GEMMA):
                self._inner, rest = LooseValue(call=False), rest[1:]
        elif name in self._schemas:
            self._finish(name)
            return rest
        else:
            return self._none(whole)
        self.name = name
        return self._argue(rest)

    def _is_keyed(self, name: str, rest: str) -> bool:
        """Without a tag: `name()` or `name(key=…)`."""
        return name in self._schemas and bool(_KEYED.match(rest))

    def _order(self, name: str) -> list[str]:
        found = self._schemas.get(name, {}).get("properties", {})
        return list(found) if isinstance(found, Mapping) else []

    def _argue(self, text: str) -> str:
        inner = self._inner
        if isinstance(inner, Arguments):
            rest = text[inner.feed(text) :]
            done = inner.done
        elif isinstance(inner, LooseValue):
            rest, done = inner.feed(text), inner.done
        else:
            rest, done = inner.feed(text), inner.state != "open"
        if done:
            self.state = "done"
            rest = rest.removeprefix(")") if self._passed else rest
        return rest

    def arguments(self) -> str:
        if not self.name:
            return ""
        inner = self._inner
        return inner.arguments() if isinstance(inner, TaggedBody) else inner.take()

    def finish(self) -> None:
        if self.state != "open":
            return
        if self.name:
            if isinstance(self._inner, TaggedBody):
                self._inner.finish()
            return
        name = self._named()
        if name and any(tag in self._header for tag in self._splits):
            self._finish(name)
        else:
            self.state = "none"

    @property
    def lists(self) -> bool:
        """Another call may follow without a tag, as in a list of Python's."""
        return isinstance(self._inner, LooseValue)

    def _finish(self, name: str) -> None:
        """A call without arguments."""
        assert isinstance(self._inner, Arguments)
        self._inner.close()
        self.name, self.state = name, "done"

    def _named(self) -> str:
        """The name in what stands before the arguments; empty where there is none."""
        header = _FENCE.sub("", self._header)
        for tag in self._naming:
            header = header.rpartition(tag)[2]
        for tag in self._splits:
            header = header.replace(tag, "\0")
        words = [word.strip() for word in header.split("\0")]
        words = [word for word in words if word]
        # DeepSeek writes the kind of tool first, Mistral an id behind the name.
        said = words[1] if len(words) > 1 and words[0] == "function" else next(iter(words), "")
        said = said.removeprefix(_GEMMA)
        if said not in self._schemas and (found := _KIMI_ID.match(said)):
            said = found.group(1)
        if said not in self._schemas and said.rpartition(".")[2] in self._schemas:
            said = said.rpartition(".")[2]
        return said if _NAME.match(said) else ""
