"""What may stand behind the tag of a tool call: a JSON object, or a name and its arguments.

A body takes text and says how much of it was its own. `name` is set once the text can only be a call; the
arguments come in pieces of JSON text from then on.
"""

import re
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from localchat.chatformat.json_text import JsonString, JsonValue

State: TypeAlias = Literal["open", "done", "none"]
"""`none`: this is no call."""

_BLANKS = " \t\r\n"
_NAMES = ("name", "function", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")
_KNOWN = (*_NAMES, *_ARGUMENTS, "type", "id")
_MOST_HEADER = 256
_NAME = re.compile(r"[\w.:/-]{1,128}\Z")
_FENCE = re.compile(r"`{3}\w*")


class Body(Protocol):
    """One call as it is read. Never raises."""

    state: State
    name: str

    def feed(self, text: str) -> int:
        """Take text while the call goes on; how many characters were taken."""
        ...

    def arguments(self) -> str:
        """What became certain of the arguments since the last time."""
        ...

    def finish(self) -> None:
        """The answer is over."""
        ...


class Arguments:
    """The value behind `arguments`, as JSON text. Null and nothing become an empty object."""

    def __init__(self) -> None:
        self._value = JsonValue()
        self._plain = False
        self._kept = ""
        self._begun = False
        self.out = ""

    @property
    def done(self) -> bool:
        return self._value.done

    @property
    def over(self) -> bool:
        """The last character was not taken."""
        return self._value.over

    def push(self, character: str) -> None:
        piece = self._value.push(character)
        if piece and not self._begun:
            self._begun, self._plain = True, piece not in "{["
        if self._plain:
            # Neither object nor list: what it is shows at its end.
            self._kept += piece
        else:
            self.out += piece
        if self._value.done:
            self.close()

    def close(self) -> None:
        """Nothing more comes."""
        if not self._begun:
            self._begun, self.out = True, "{}"
        elif self._plain:
            self.out, self._kept, self._plain = (
                "{}" if self._kept == "null" else self._kept,
                "",
                False,
            )


class ObjectBody:
    """`{"name": "…", "arguments": {…}}`, with its first bracket; keys in any order, and more keys. Arguments
    may be a string that holds JSON; `function` may hold the object of name and arguments. `offered`: it stands
    without a tag, and only these names, with arguments, make it a call."""

    def __init__(self, offered: Sequence[str] | None = None) -> None:
        self.state: State = "open"
        self.name = ""
        self._offered = offered
        self._levels = 0
        self._at: Literal["key", "in key", "colon", "value", "in value", "next"] = "key"
        self._key = ""
        self._said = ""
        self._string: JsonString | None = None
        self._other = JsonValue()
        self._arguments: Arguments | None = None

    def feed(self, text: str) -> int:
        for at, character in enumerate(text):
            if self.state != "open":
                return at
            self._push(character)
        return len(text)

    def arguments(self) -> str:
        if not self.name or self._arguments is None:
            return ""
        out, self._arguments.out = self._arguments.out, ""
        return out

    def finish(self) -> None:
        if self.state == "open" and not self.name:
            self.state = "none"

    def _push(self, character: str) -> None:
        match self._at:
            case "in key":
                self._in_key(character)
            case "in value":
                self._in_value(character)
            case _ if character in _BLANKS:
                pass
            case "value":
                self._begin_value(character)
            case _:
                self._between(character)

    def _between(self, character: str) -> None:
        at = self._at
        if character == "{" and at == "key" and not self._levels:
            self._levels = 1
        elif character == '"' and at == "key" and self._levels:
            self._key, self._string, self._at = "", JsonString(), "in key"
        elif character == ":" and at == "colon":
            self._at = "value"
        elif character == "," and at in ("next", "key") and self._levels:
            self._at = "key"
        elif character == "}" and at in ("next", "key") and self._levels:
            self._levels, self._at = self._levels - 1, "next"
            if not self._levels:
                self._end()
        else:
            self._fail()

    def _in_key(self, character: str) -> None:
        assert self._string is not None
        self._key += self._string.push(character)
        if self._string.done:
            self._string, self._at = None, "colon"
            if self._offered is not None and self._key not in _KNOWN:
                self._fail()  # any object: its text need not wait for its end

    def _begin_value(self, character: str) -> None:
        self._at, self._other = "in value", JsonValue()
        if self._key == "function" and character == "{":
            self._levels, self._at = self._levels + 1, "key"
            return
        if self._key in _ARGUMENTS and self._arguments is None:
            self._arguments = Arguments()
            self._decide()
        elif self._key not in _NAMES or self._said:
            self._key = ""
        if self._key and character == '"':
            self._string = JsonString()
        else:
            self._in_value(character)

    def _in_value(self, character: str) -> None:
        arguments = self._arguments if self._key in _ARGUMENTS else None
        if self._string is not None:
            said = self._string.push(character)
            if arguments is None:
                self._said += said
            else:
                for one in said:
                    arguments.push(one)
            if self._string.done:
                self._string, self._at = None, "next"
                if arguments is not None:
                    arguments.close()
                self._decide()
            return
        value: JsonValue | Arguments = self._other if arguments is None else arguments
        value.push(character)
        if value.done:
            self._at = "next"
            if value.over:
                self._push(character)

    def _decide(self) -> None:
        """Behind a tag a name makes it a call, elsewhere a name that was offered, with arguments."""
        tagged = self._offered is None
        if self._said and self._string is None and not self._is_offered():
            self._fail()
        elif self._said and self._string is None and (tagged or self._arguments is not None):
            self.name = self._said

    def _is_offered(self) -> bool:
        return self._offered is None or self._said in self._offered

    def _end(self) -> None:
        if self._said and self._is_offered():
            self._arguments = self._arguments or Arguments()
            self._arguments.close()
            self.name = self._said
            self.state = "done"
        else:
            self.state = "none"

    def _fail(self) -> None:
        """No JSON any more: behind a certain call that is its end."""
        self.state = "done" if self.name else "none"


class NamedBody:
    """A name, perhaps between tags, then the arguments: `name[ARGS]{…}`, `function<｜tool▁sep｜>name`, a fence.
    `splits`: the tags."""

    def __init__(self, splits: Sequence[str]) -> None:
        self.state: State = "open"
        self.name = ""
        self._splits = splits
        self._header = ""
        self._arguments = Arguments()

    def feed(self, text: str) -> int:
        for at, character in enumerate(text):
            if self.state != "open":
                return at
            if self.name:
                self._arguments.push(character)
                if self._arguments.done:
                    self.state = "done"
            elif character == "{":
                self.name = self._named()
                if not self.name:
                    self.state = "none"
                self._arguments.push(character)
            else:
                self._header += character
                if len(self._header) > _MOST_HEADER:
                    self.state = "none"
        return len(text)

    def arguments(self) -> str:
        out, self._arguments.out = self._arguments.out, ""
        return out

    def finish(self) -> None:
        if self.state != "open" or self.name:
            return
        if any(tag in self._header for tag in self._splits):
            self.name = self._named()
        self.state = "done" if self.name else "none"
        self._arguments.close()

    def _named(self) -> str:
        """The name in what stands before the arguments; empty where there is none."""
        header = _FENCE.sub("", self._header)
        for tag in self._splits:
            header = header.replace(tag, "\0")
        words = [word.strip() for word in header.split("\0")]
        words = [word for word in words if word]
        # DeepSeek writes the kind of tool first, Mistral an id behind the name.
        said = words[1] if len(words) > 1 and words[0] == "function" else next(iter(words), "")
        return said if _NAME.match(said) else ""
