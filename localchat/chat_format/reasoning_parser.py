"""Parser that splits a streamed answer into reasoning and text.

It tolerates the mistakes of models: a second opening tag, white space around tags, a closing tag without an
opening one, and a block without an end. Tags never reach the output, so text that may become a tag is buffered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from localchat.chat_format.parser import Answer, Part, Thought, find_first, partial_tag_start


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """Reasoning tags of a family of models."""

    name: str
    signs: tuple[str, ...]
    """Texts that identify the family in a template."""
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    """Markup around the answer, which never reaches the output."""
    anywhere: bool = False
    """Whether blocks may open in the middle of the answer, because no model would quote these tags.

    Otherwise the first closing tag without an opening one is markup, because the template opened the block, and
    later ones are text.
    """

    answer: str = ""
    """Markup between the reasoning and the answer."""

    def closing(self, *, again: bool) -> str:
        """Return the text that closes a block of reasoning early.

        again: the answer follows, and not a call in another channel or more reasoning.
        """
        if again or self.answer.isspace():
            return self.closes[0] + self.answer
        return self.closes[0]

    @staticmethod
    def of(template: str) -> "ReasoningFamily":
        """Return the family of a template's source."""
        for family in REASONING_FAMILIES:
            if any(sign in template for sign in family.signs):
                return family
        return THINK

    @property
    def markup(self) -> tuple[str, ...]:
        """All tags. The detokenizer must print them even if they are control tokens."""
        return (*self.opens, *self.closes, *self.dropped)

    def left_open(self, prompt: str, since: int | None = None) -> bool:
        """Return whether a prompt ends inside a block.

        since: start of a message to continue, which is searched. Otherwise only a tag at the end counts.
        """
        if since is None:
            return prompt.rstrip().endswith(tuple(tag.rstrip() for tag in self.opens))
        tail = prompt[since:]
        opened = max(tail.rfind(tag) for tag in self.opens)
        return opened > max(tail.rfind(tag) for tag in self.closes)


THINK = ReasoningFamily(
    "think", ("<think>", "</think>"), ("<think>",), ("</think>",), answer="\n\n"
)
"""The most common family."""

REASONING_FAMILIES: Sequence[ReasoningFamily] = (
    ReasoningFamily(
        "harmony",
        ("<|channel|>analysis", "<|start|>assistant<|channel|>"),
        ("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"),
        ("<|end|>",),
        (
            "<|channel|>final<|message|>",
            "<|start|>assistant<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|start|>assistant<|channel|>commentary<|message|>",
            "<|start|>assistant",
            "<|end|>",
            "<|return|>",
        ),
        anywhere=True,
        answer="<|start|>assistant<|channel|>final<|message|>",
    ),
    ReasoningFamily(
        "gemma4", ("<|channel>thought",), ("<|channel>thought",), ("<channel|>",), anywhere=True
    ),
    ReasoningFamily(
        "command",
        ("<|START_THINKING|>",),
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        anywhere=True,
        answer="<|START_RESPONSE|>",
    ),
    ReasoningFamily(
        "solar",
        ("<|begin|>assistant<|think|>",),
        ("<|think|>", "<|begin|>assistant<|think|>"),
        ("<|end|>",),
        ("<|content|>", "<|begin|>assistant<|content|>", "<|end|>"),
        anywhere=True,
        answer="<|begin|>assistant<|content|>",
    ),
    ReasoningFamily(
        "kimi3",
        ("<|open|>think", "'<|open|>'", '"<|open|>"'),
        ("<|open|>think<|sep|>",),
        ("<|close|>think<|sep|>",),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        anywhere=True,
        answer="<|open|>response<|sep|>",
    ),
    ReasoningFamily(
        "apertus",
        ("<|inner_prefix|>",),
        ("<|inner_prefix|>",),
        ("<|inner_suffix|>",),
        anywhere=True,
    ),
    ReasoningFamily(
        "hunyuan",
        ("HYTK = ':opensource'",),
        ("<think:opensource>",),
        ("</think:opensource>",),
        anywhere=True,
    ),
    ReasoningFamily(
        "muse",
        ("to=self<|message|>", "to=self' + '<|message|>'"),
        (" to=self<|message|>", "<|start|>assistant to=self<|message|>"),
        ("<|eom|>",),
        ("<|start|>assistant", " to=user<|message|>", "<|eot|>"),
        anywhere=True,
        answer="<|start|>assistant to=user<|message|>",
    ),
    ReasoningFamily("mistral", ("[THINK]",), ("[THINK]",), ("[/THINK]",)),
    ReasoningFamily("seed", ("<seed:think>",), ("<seed:think>",), ("</seed:think>",)),
    ReasoningFamily("minimax3", ("<mm:think>",), ("<mm:think>",), ("</mm:think>",)),
    ReasoningFamily(
        "apriel",
        ("[BEGIN FINAL RESPONSE]",),
        ("Here are my reasoning steps:", "<thinking>"),
        ("[BEGIN FINAL RESPONSE]", "</thinking>"),
        ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    ),
    ReasoningFamily(
        "granite",
        ("response between <response>",),
        ("<think>",),
        ("</think>",),
        ("<response>", "</response>"),
        answer="<response>",
    ),
    THINK,
)
"""Families in the order of detection: the most specific signs come first."""


_State: TypeAlias = Literal["before", "thinking", "between", "answering"]


class ReasoningParser:
    """Separates reasoning from text."""

    def __init__(
        self, family: ReasoningFamily, *, opened: bool = False, ends: tuple[str, ...] = ()
    ) -> None:
        """opened: the prompt ends inside a block. ends: other tags that end a block, such as those of calls."""
        self._family = family
        self._closes = (*family.closes, *ends)
        self._state: _State = "thinking" if opened else "before"
        self._at_start = opened
        self._thought = opened
        self._buffer = ""
        self._tag_starts = frozenset(tag[:1] for tag in family.markup)

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._state == "thinking"

    def passes(self, text: str) -> bool:
        return self._state == "answering" and not self._buffer and self._tag_starts.isdisjoint(text)

    def feed(self, text: str) -> list[Part]:
        """Add text, and return the parts that are certain."""
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """Return the buffered text. An incomplete tag is text, except a closing tag at the end of reasoning.

        That tag is dropped, because the answer reached its length limit.
        """
        text = self._buffer
        self._buffer = ""
        if self._state == "thinking":
            if len(text) > 1:
                text = text[: partial_tag_start(text, self._closes)]
            text = text.rstrip()
            return [Thought(text)] if text else []
        if self._state == "between":
            text = _after_tag(text)
        return [Answer(text)] if text else []

    def _step(self, parts: list[Part]) -> bool:
        """Read one token. Return False if more text is needed."""
        if self._state == "thinking":
            return self._think(parts)
        if self._state == "answering":
            return self._answer(parts)
        return self._begin()

    def _begin(self) -> bool:
        """Look for tags before the answer or after a block, with white space around them."""
        text = self._buffer.lstrip()
        if not text:
            return False
        markup = self._family.markup
        if any(tag.startswith(text) and tag != text for tag in markup):
            return False
        tag = max((tag for tag in markup if text.startswith(tag)), key=len, default="")
        if tag:
            self._buffer = text[len(tag) :]
            self._enter(tag, answering="between")
            return True
        if self._state == "between":
            self._buffer = _after_tag(self._buffer)
        self._state = "answering"
        return True

    def _think(self, parts: list[Part]) -> bool:
        if self._at_start:
            self._buffer = self._buffer.lstrip()
            tags = (*self._family.opens, *self._closes)
            if not self._buffer or any(
                tag.startswith(self._buffer) and tag != self._buffer for tag in tags
            ):
                return False
            self._at_start = False
            for tag in self._family.opens:
                if self._buffer.startswith(tag):
                    self._buffer = self._buffer[len(tag) :]
                    self._at_start = True
                    return True
        index, tag = find_first(self._buffer, self._closes)
        if tag:
            self._emit(parts, self._buffer[:index].rstrip())
            if tag in self._family.closes:
                self._buffer = self._buffer[index + len(tag) :]
                self._state = "between"
            else:
                # Leave the tag of a call in the buffer, because it belongs to the answer.
                self._buffer = self._buffer[index:]
                self._state = "answering"
            return True
        certain = self._buffer[: partial_tag_start(self._buffer, self._closes)].rstrip()
        self._buffer = self._buffer[len(certain) :]
        self._emit(parts, certain)
        return False

    def _answer(self, parts: list[Part]) -> bool:
        family = self._family
        tags = family.dropped
        if family.anywhere:
            tags = (*tags, *family.opens)
        if family.anywhere or not self._thought:
            tags = (*tags, *family.closes)
        index, tag = find_first(self._buffer, tags)
        if tag:
            self._emit(parts, self._buffer[:index])
            self._buffer = self._buffer[index + len(tag) :]
            self._enter(tag, answering="answering")
            return True
        index = partial_tag_start(self._buffer, tags)
        self._emit(parts, self._buffer[:index])
        self._buffer = self._buffer[index:]
        return False

    def _enter(self, tag: str, *, answering: _State) -> None:
        """Enter the state after a tag outside reasoning."""
        if tag in self._family.opens:
            self._state = "thinking"
            self._at_start = True
            self._thought = True
            return
        if tag in self._family.closes:
            self._thought = True
        self._state = answering

    def _emit(self, parts: list[Part], text: str) -> None:
        if text:
            parts.append(Thought(text) if self._state == "thinking" else Answer(text))


def _after_tag(text: str) -> str:
    """Remove blank lines after a tag, but keep the indentation of the first line."""
    stripped = text.lstrip()
    _, newline, indentation = text[: len(text) - len(stripped)].rpartition("\n")
    return indentation + stripped if newline else stripped
