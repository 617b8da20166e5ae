"""Parser of answers in channels: reasoning, text and calls are separate messages, each with a header.

- Harmony (gpt-oss) writes `<|channel|>analysis<|message|>…<|end|>` and
  `<|start|>assistant<|channel|>final<|message|>…`. A call is a message `to=functions.NAME`, in the header of
  its channel or of its role.
- Muse writes the same without channels. `to=self` is reasoning.
"""

import re
import secrets
from dataclasses import dataclass
from typing import Literal

from localchat.chat_format.parser import Answer, Call, Part, Thought, find_first, partial_tag_start
from localchat.chat_format.tool_calls.json_body import JsonObject, json_text

_MAX_HEADER = 256
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_NO_TOOL = ("assistant", "user", "all")


@dataclass(frozen=True, slots=True)
class ChannelSyntax:
    """Tags of messages in channels."""

    begins: tuple[str, ...]
    """Tags that start a header."""
    message: str
    """Tag that ends a header."""
    ends: tuple[str, ...]
    """Tags after a message."""
    lead: tuple[str, ...]
    """Starts of an answer that continue a header from the prompt."""

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


class ChannelParser:
    """Parses a whole answer. Calls of Muse, whose bodies are not JSON, become text for CallParser."""

    def __init__(
        self,
        syntax: ChannelSyntax,
        names: tuple[str, ...],
        *,
        thinking: bool = False,
    ) -> None:
        """names: the offered tools.

        Without any, nothing is a call. thinking: the prompt ends inside reasoning.
        """
        self.syntax = syntax
        self._names = names
        self._state: Literal["lead", "header", "message"] = "lead"
        self._target: Literal["answer", "thought", "call", "nothing"] = "answer"
        if thinking:
            self._state = "message"
            self._target = "thought"
        self._buffer = ""
        self._name = ""
        self._arguments: list[str] = []
        self._count = 0

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._state == "message" and self._target == "thought"

    def passes(self, text: str) -> bool:
        # Markup may begin with any character.
        return False

    def feed(self, text: str) -> list[Part]:
        """Add text, and return the parts that are certain."""
        self._buffer += text
        parts: list[Part] = []
        while self._buffer and self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the parts of the buffered text. A header without its message is dropped."""
        parts: list[Part] = []
        if self._state == "message":
            text = self._buffer
            if len(text) > 1:
                text = text[: partial_tag_start(text, self.syntax.borders)]
            self._emit(parts, text)
            self._end(parts)
        elif self._state == "lead" and not self._buffer.strip().startswith("to="):
            self._emit(parts, self._buffer)
        self._buffer = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Read one token. Return False if more text is needed."""
        match self._state:
            case "lead":
                return self._lead()
            case "header":
                return self._header(parts)
            case "message":
                return self._message(parts)

    def _lead(self) -> bool:
        """Decide whether the answer starts with the end of a header, or with text."""
        text = self._buffer.lstrip()
        tags = tuple(tag.lstrip() for tag in self.syntax.lead)
        if any(tag.startswith(text) and tag != text for tag in tags):
            return False
        self._state = "message"
        if text.startswith(tags):
            self._state = "header"
        return True

    def _header(self, parts: list[Part]) -> bool:
        """Read up to the tag that ends the header."""
        index, tag = find_first(self._buffer, (self.syntax.message, *self.syntax.ends))
        if not tag:
            if len(self._buffer) <= _MAX_HEADER:
                return False
            self._open("answer")
            self._emit(parts, self._buffer)
            self._buffer = ""
            return True
        header = self._buffer[:index]
        self._buffer = self._buffer[index + len(tag) :]
        if tag == self.syntax.message:
            self._begin(header)
        else:
            # The header has no message.
            self._open("answer")
            if header.strip() and not header.lstrip().startswith(self.syntax.begins):
                self._emit(parts, header)
        return True

    def _begin(self, header: str) -> None:
        """Start the message of a header."""
        match = _RECIPIENT.search(header)
        recipient = match.group(1).removeprefix("functions.") if match else ""
        if recipient == "self":
            return self._open("thought")
        if recipient and recipient not in _NO_TOOL and self._names and self.syntax is HARMONY:
            return self._call(recipient)
        channels = _CHANNEL.findall(header)
        return self._open("thought" if channels[-1:] == ["analysis"] else "answer")

    def _open(self, target: Literal["answer", "thought"]) -> None:
        self._state = "message"
        self._target = target

    def _call(self, name: str) -> None:
        self._state = "message"
        self._target = "call"
        self._name = name
        self._arguments.clear()

    def _message(self, parts: list[Part]) -> bool:
        borders = self.syntax.borders
        index, tag = find_first(self._buffer, borders)
        if not tag:
            index = partial_tag_start(self._buffer, borders)
            self._emit(parts, self._buffer[:index])
            self._buffer = self._buffer[index:]
            return False
        self._emit(parts, self._buffer[:index])
        self._end(parts)
        if tag in self.syntax.begins:
            self._buffer = self._buffer[index:]
            self._state = "header"
            # The tag is part of the header, which may contain another tag.
            return self._header(parts)
        self._buffer = self._buffer[index + len(tag) :]
        return True

    def _emit(self, parts: list[Part], text: str) -> None:
        if self._target == "call":
            self._arguments.append(text)
        elif text:
            parts.append(Thought(text) if self._target == "thought" else Answer(text))

    def _end(self, parts: list[Part]) -> None:
        """End a message. Arguments that are not an object become a JSON string."""
        if self._target == "call":
            arguments = self._call_arguments()
            if arguments is not None:
                parts.append(Call(self._count, f"call_{secrets.token_hex(12)}", self._name))
                parts.append(Call(self._count, arguments=arguments))
                self._count += 1
        self._target = "answer"

    def _call_arguments(self) -> str | None:
        """Return the arguments of a call. None if they are cut off."""
        text = "".join(self._arguments).strip()
        if not text:
            return "{}"
        if text[0] != "{":
            return json_text(text)
        repaired = JsonObject()
        repaired.feed(text)
        if repaired.closed:
            return repaired.text
        return None
