"""Parser of reasoning: splits a streamed answer into reasoning and text.

It tolerates what models write: a second opening tag, blanks around tags, a closing tag without an
opening, a block that never ends. Tags are never part of the output: text that may still become one
is held back.
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
    """Markup around the answer, never part of the output."""
    anywhere: bool = False
    """Blocks may also open in the middle of the answer, because no model would quote their tags. Otherwise a
    closing tag without an opening is markup once (the template opened the block), and text from then on."""

    answer: str = ""
    """Markup between the reasoning and the answer."""

    def closing(self, *, again: bool) -> str:
        """Text that closes a block of reasoning before its time.

        again: the answer itself begins too, and not a call in another channel, or reasoning once more.
        """
        return self.closes[0] + (self.answer if again or self.answer.isspace() else "")

    @staticmethod
    def default() -> "ReasoningFamily":
        """The most common family, `<think>`."""
        return _THINK

    @staticmethod
    def of(template: str) -> "ReasoningFamily":
        """Find the family by a template's source."""
        for family in REASONING_FAMILIES:
            if any(sign in template for sign in family.signs):
                return family
        return _THINK

    @property
    def markup(self) -> tuple[str, ...]:
        """Every tag. The detokenizer must print those that are control tokens."""
        return (*self.opens, *self.closes, *self.dropped)

    def left_open(self, prompt: str, since: int | None = None) -> bool:
        """Whether a prompt ends inside a block.

        Only a tag at the end counts, or with `since` the whole text from there on (a message to
        continue).
        """
        if since is None:
            return prompt.rstrip().endswith(tuple(tag.rstrip() for tag in self.opens))
        tail = prompt[since:]
        opened = max(tail.rfind(tag) for tag in self.opens)
        return opened > max(tail.rfind(tag) for tag in self.closes)


_THINK = ReasoningFamily(
    "think", ("<think>", "</think>"), ("<think>",), ("</think>",), answer="\n\n"
)

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
    _THINK,
)
"""Families, the most specific signs first."""


_State: TypeAlias = Literal["before", "thinking", "between", "answering"]


class ReasoningParser:
    """Splits reasoning from text.

    opened: the prompt already ends inside a block. ends: other tags, such as those of calls, that end a block.
    """

    def __init__(
        self, family: ReasoningFamily, *, opened: bool = False, ends: tuple[str, ...] = ()
    ) -> None:
        self._family = family
        self._closes = (*family.closes, *ends)
        self._state: _State = "thinking" if opened else "before"
        self._fresh = opened
        self._thought = opened
        self._held = ""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._state == "thinking"

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The rest. An incomplete tag is text, except a closing tag at the end of reasoning.

        That one comes from an answer that reached its length limit, and is dropped.
        """
        held = self._held
        self._held = ""
        if self._state == "thinking":
            kept = held[: partial_tag_start(held, self._closes)] if len(held) > 1 else held
            return [Thought(kept.rstrip())] if kept.strip() else []
        if self._state == "between":
            held = _after_tag(held)
        return [Answer(held)] if held else []

    def _step(self, parts: list[Part]) -> bool:
        """Advance by one token; False if more text is needed."""
        if self._state == "thinking":
            return self._think(parts)
        if self._state == "answering":
            return self._answer(parts)
        return self._begin()

    def _begin(self) -> bool:
        """Before the first word, or after a block: tags may follow, with blanks around them."""
        family = self._family
        bare = self._held.lstrip()
        if not bare:
            return False
        if any(tag.startswith(bare) and tag != bare for tag in family.markup):
            return False
        found = [tag for tag in family.markup if bare.startswith(tag)]
        if found:
            tag = max(found, key=len)
            self._held = bare[len(tag) :]
            self._enter(tag, answering="between")
            return True
        if self._state == "between":
            self._held = _after_tag(self._held)
        self._state = "answering"
        return True

    def _think(self, parts: list[Part]) -> bool:
        if self._fresh:
            self._held = self._held.lstrip()
            tags = (*self._family.opens, *self._closes)
            if not self._held or any(
                tag.startswith(self._held) and tag != self._held for tag in tags
            ):
                return False
            self._fresh = False
            for tag in self._family.opens:
                if self._held.startswith(tag):
                    self._held = self._held[len(tag) :]
                    self._fresh = True
                    return True
        at, tag = find_first(self._held, self._closes)
        if tag:
            self._emit(parts, self._held[:at].rstrip())
            own = tag in self._family.closes
            self._held = self._held[at + len(tag) if own else at :]
            self._state = "between" if own else "answering"
            return True
        certain = self._held[: partial_tag_start(self._held, self._closes)].rstrip()
        self._held = self._held[len(certain) :]
        self._emit(parts, certain)
        return False

    def _answer(self, parts: list[Part]) -> bool:
        family = self._family
        tags = family.dropped
        if family.anywhere:
            tags = (*tags, *family.opens)
        if family.anywhere or not self._thought:
            tags = (*tags, *family.closes)
        at, tag = find_first(self._held, tags)
        if tag:
            self._emit(parts, self._held[:at])
            self._held = self._held[at + len(tag) :]
            self._enter(tag, answering="answering")
            return True
        at = partial_tag_start(self._held, tags)
        self._emit(parts, self._held[:at])
        self._held = self._held[at:]
        return False

    def _enter(self, tag: str, *, answering: _State) -> None:
        """Enter the state after a tag outside reasoning."""
        if tag in self._family.opens:
            self._state = "thinking"
            self._fresh = True
            self._thought = True
            return
        if tag in self._family.closes:
            self._thought = True
        self._state = answering

    def _emit(self, parts: list[Part], text: str) -> None:
        if text:
            parts.append(Thought(text) if self._state == "thinking" else Answer(text))


def _after_tag(text: str) -> str:
    """Beginning of the answer after a tag: blank lines are dropped, an indent is kept."""
    bare = text.lstrip()
    blanks = text[: len(text) - len(bare)]
    return (blanks.rpartition("\n")[2] if "\n" in blanks else "") + bare
