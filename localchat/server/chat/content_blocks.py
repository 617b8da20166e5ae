"""Collects an answer as ordered content blocks per choice.

A block is a text, a stretch of reasoning or a tool call. Anthropic's and the Responses API number the blocks
of an answer and stream their changes: each is opened, filled and closed before the next. An answer without
content gets one empty text block, because clients read the first block without checking that there is one.
"""

import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from localchat.engine.events import Reasoning, Text, TokenLogprob, ToolCall
from localchat.server.generation import ChoiceEnd, OutputEvent, PromptEcho

BlockKind: TypeAlias = Literal["text", "reasoning", "call"]


@dataclass(eq=False, slots=True)
class ContentBlock:
    """A text, a stretch of reasoning or a tool call."""

    index: int
    """Position in the answer."""
    kind: BlockKind
    call: int = -1
    """Number of the tool call within the answer."""
    id: str = ""
    """Id of the tool call."""
    name: str = ""
    """Name of the called tool."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    complete: bool = True
    """False if the token limit cut it off."""

    @property
    def text(self) -> str:
        """Content so far: text, or the arguments of a call as JSON."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockOpened:
    """A new block, still empty."""

    block: ContentBlock


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """A piece was added to a block."""

    block: ContentBlock
    piece: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockClosed:
    """The block does not change any more."""

    block: ContentBlock


BlockEvent: TypeAlias = BlockOpened | BlockDelta | BlockClosed


class ContentBlocks:
    """The content of one choice, as blocks in the order they began."""

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self.prompt: tuple[TokenLogprob, ...] | None = None
        """Log probabilities of the prompt, if the client asked for them."""
        self.end: ChoiceEnd | None = None
        self._open: ContentBlock | None = None

    @property
    def text(self) -> str:
        """All text blocks joined."""
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        """All reasoning blocks joined."""
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def calls(self) -> list[ContentBlock]:
        """The tool calls."""
        return [block for block in self.blocks if block.kind == "call"]

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Log probabilities of the text's tokens."""
        return tuple(token for block in self.blocks for token in block.logprobs)

    def add(self, event: OutputEvent) -> list[BlockEvent]:
        """Add an event of this choice. Returns the changes, in order."""
        match event:
            case Text(text=text, logprobs=logprobs) if text or logprobs:
                return self._extend("text", text, logprobs)
            case Reasoning(text=text) if text:
                return self._extend("reasoning", text)
            case ToolCall() if event.id:
                number = len(self.blocks)
                return self._begin(ContentBlock(number, "call", event.call, event.id, event.name))
            case ToolCall():
                return [self._append(self._call(event.call), event.arguments)]
            case PromptEcho(tokens=tokens):
                self.prompt = tokens
            case ChoiceEnd(reason=reason):
                self.end = event
                changes = [] if self.blocks else self._extend("text", "")
                if self._open is not None:
                    self._open.complete = reason != "length"
                return [*changes, *self._close()]
        return []

    def _extend(
        self, kind: BlockKind, text: str, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> list[BlockEvent]:
        changes: list[BlockEvent] = []
        block = self._open
        if block is None or block.kind != kind:
            block = ContentBlock(len(self.blocks), kind)
            changes = self._begin(block)
        if text or logprobs:
            changes.append(self._append(block, text, logprobs))
        return changes

    def _call(self, number: int) -> ContentBlock:
        return next(block for block in reversed(self.blocks) if block.call == number)

    def _begin(self, block: ContentBlock) -> list[BlockEvent]:
        changes = self._close()
        self._open = block
        self.blocks.append(block)
        return [*changes, BlockOpened(block)]

    def _append(
        self, block: ContentBlock, text: str, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> BlockDelta:
        block.pieces.append(text)
        block.logprobs += logprobs
        return BlockDelta(block, text, logprobs)

    def _close(self) -> list[BlockEvent]:
        block = self._open
        self._open = None
        return [] if block is None else [BlockClosed(block)]


class CollectedAnswer:
    """A whole answer, for responses that are not streamed."""

    def __init__(self, choices: int) -> None:
        self.choices = [ContentBlocks() for _ in range(choices)]
        self.first_text_s: float | None = None
        """When the first text came, by time.perf_counter."""
        self.last_text_s = 0.0

    def add(self, event: OutputEvent) -> None:
        """Add the next event of the generation."""
        if isinstance(event, Text):
            self.last_text_s = time.perf_counter()
            if self.first_text_s is None:
                self.first_text_s = self.last_text_s
        self.choices[event.choice].add(event)
