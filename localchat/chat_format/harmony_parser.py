"""Parser of answers in channels: reasoning, text and calls are separate messages, each with a header.

Harmony (gpt-oss): `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`; a
call is a message `to=functions.NAME`, in the header of its channel or of its role. Muse writes the same without
channels; `to=self` is reasoning. Functionary 3.2 begins each message with `>>>`, a name and a line break.
"""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Literal

from localchat.chat_format.parser import Answer, Call, Part, Thought, find_first, partial_tag_start
from localchat.chat_format.tool_calls.json_body import Arguments

_MAX_HEADER = 256
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_NO_TOOL = ("assistant", "user", "all")


@dataclass(frozen=True, slots=True)
class ChannelSyntax:
    """Tags of messages in channels."""

    begins: tuple[str, ...]
    """Tags that begin a header."""
    message: str
    """Tag that ends a header."""
    ends: tuple[str, ...]
    """Tags after a message."""
    lead: tuple[str, ...]
    """Beginnings of an answer that continue a header from the prompt."""
    recipients: bool = False
    """The whole header is the name of the recipient."""

    @property
    def borders(self) -> tuple[str, ...]:
        return (*self.begins, *self.ends)


HARMONY = ChannelSyntax(
    ("<|start|>", "<|channel|>"),
    "<|message|>",
    ("<|end|>", "<|call|>", "<|return|>"),
    (" to=", "<|channel|>", "<|start|>"),
)
MUSE = ChannelSyntax(
    ("<|start|>",),
    "<|message|>",
    ("<|eom|>", "<|eot|>"),
    (" to=", "<|message|>", "<|start|>"),
)
FUNCTIONARY = ChannelSyntax((">>>",), "\n", (), (), recipients=True)


class ChannelParser:
    """Parses a whole answer. A call whose body is not JSON (Muse's) is passed on as text, for CallParser.

    names: tools that were offered; without any, nothing is a call. thinking: the prompt ends inside a message
    of reasoning.
    """

    def __init__(
        self,
        syntax: ChannelSyntax,
        names: tuple[str, ...],
        *,
        thinking: bool = False,
    ) -> None:
        self.syntax = syntax
        self._names = names
        self._state: Literal["lead", "header", "message"] = "lead"
        self._target: Literal["answer", "thought", "call", "nothing"] = "answer"
        if thinking:
            self._state = "message"
            self._target = "thought"
        self._held = ""
        self._fresh = False
        self._name = ""
        self._arguments = Arguments()
        self._text_argument: list[str] | None = None
        self._count = 0

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._state == "message" and self._target == "thought"

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while self._held and self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The rest. A header without its message belongs to an answer that was cut off, and is dropped."""
        parts: list[Part] = []
        if self._state == "message":
            held = self._held[: partial_tag_start(self._held, self.syntax.borders)]
            self._emit(parts, held if len(self._held) > 1 else self._held)
            self._end(parts)
        elif self._state == "lead" and not self._held.strip().startswith("to="):
            self._emit(parts, self._held)
        self._held = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Advance by one token; False if more text is needed."""
        match self._state:
            case "lead":
                return self._lead()
            case "header":
                return self._header(parts)
            case "message":
                return self._message(parts)

    def _lead(self) -> bool:
        """Beginning of the answer: the rest of a header, or text of a model that writes none."""
        syntax = self.syntax
        held = self._held
        if syntax.recipients:
            name, line, _ = held.partition("\n")
            known = (*self._names, "all")
            if not line:
                if any(one.startswith(name.strip()) for one in known):
                    return False
            elif name.strip() in known:
                self._state = "header"
                return True
            self._state = "message"
            return True
        bare = held.lstrip()
        if any(tag.lstrip().startswith(bare) and tag.lstrip() != bare for tag in syntax.lead):
            return False
        starts = bare.startswith(tuple(tag.lstrip() for tag in syntax.lead))
        self._state = "header" if starts else "message"
        return True

    def _header(self, parts: list[Part]) -> bool:
        """Read up to the tag that ends the header."""
        at, tag = find_first(self._held, (self.syntax.message, *self.syntax.ends))
        if not tag:
            if len(self._held) <= _MAX_HEADER:
                return False
            self._open("answer")
            self._emit(parts, self._held)
            self._held = ""
            return True
        header = self._held[:at]
        self._held = self._held[at + len(tag) :]
        if tag == self.syntax.message:
            self._begin(header)
        else:
            self._open("answer")  # a header without a message
            if header.strip() and not header.lstrip().startswith(self.syntax.begins):
                self._emit(parts, header)
        return True

    def _begin(self, header: str) -> None:
        """Begin a message, by its header."""
        if self.syntax.recipients:
            name = header.removeprefix(">>>").strip()
            if name in self._names:
                return self._call(name)
            return self._open("answer")
        target = _RECIPIENT.search(header)
        channel = (_CHANNEL.findall(header) or [""])[-1]
        recipient = target.group(1).removeprefix("functions.") if target else ""
        if recipient == "self":
            return self._open("thought")
        if recipient and recipient not in _NO_TOOL and self._names and self.syntax is HARMONY:
            return self._call(recipient)
        return self._open("thought" if channel == "analysis" else "answer")

    def _open(self, target: Literal["answer", "thought"]) -> None:
        self._state = "message"
        self._target = target
        self._fresh = True

    def _call(self, name: str) -> None:
        self._state = "message"
        self._target = "call"
        self._fresh = True
        self._name = name
        self._arguments = Arguments()

    def _message(self, parts: list[Part]) -> bool:
        borders = self.syntax.borders
        at, tag = find_first(self._held, borders)
        if not tag:
            at = partial_tag_start(self._held, borders)
            self._emit(parts, self._held[:at])
            self._held = self._held[at:]
            return False
        self._emit(parts, self._held[:at])
        self._end(parts)
        if tag in self.syntax.begins:
            self._held = self._held[at:]
            self._state = "header"
            # The tag is part of the header, which may contain another.
            return self._header(parts)
        self._held = self._held[at + len(tag) :]
        return True

    def _emit(self, parts: list[Part], text: str) -> None:
        if self._target == "call":
            self._emit_arguments(parts, text)
        elif text:
            parts.append(Thought(text) if self._target == "thought" else Answer(text))

    def _emit_arguments(self, parts: list[Part], text: str) -> None:
        if self._fresh:
            text = text.lstrip()
            if not text:
                return
            self._fresh = False
            self._text_argument = None if text[0] == "{" else []
            self._emit_call(parts)
        if self._text_argument is not None:
            self._text_argument.append(text)
            return
        self._arguments.feed(text)
        if piece := self._arguments.take():
            parts.append(Call(self._count - 1, arguments=piece))

    def _emit_call(self, parts: list[Part]) -> None:
        parts.append(Call(self._count, f"call_{secrets.token_hex(12)}", self._name))
        self._count += 1

    def _end(self, parts: list[Part]) -> None:
        """End a message. Arguments that are not an object become a JSON string."""
        if self._target == "call":
            if self._fresh:
                self._emit_call(parts)
                parts.append(Call(self._count - 1, arguments="{}"))
            elif self._text_argument is not None:
                text_argument = json.dumps(
                    "".join(self._text_argument).rstrip(), ensure_ascii=False
                )
                parts.append(Call(self._count - 1, arguments=text_argument))
        self._target = "answer"
        self._text_argument = None
