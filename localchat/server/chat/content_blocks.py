"""Collects an answer as ordered content blocks, for each choice.

A block is a text, a stretch of reasoning or a tool call. Anthropic's and the Responses API number the blocks
and stream their changes: a block is opened, filled and closed before the next one. An answer without content
gets one empty text block, because clients read the first block without checking.
"""

import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from localchat.engine.events import Reasoning, Text, TokenLogprob, ToolCall
from localchat.server.generation import ChoiceEnd, OutputEvent, PromptEcho, ToolOutcome

BlockKind: TypeAlias = Literal["text", "reasoning", "call"]


@dataclass(eq=False, slots=True)
class ContentBlock:
    """A text, a stretch of reasoning or a tool call."""

    index: int
    """Index in the answer."""
    kind: BlockKind
    call: int = -1
    """Index of the tool call in the answer."""
    id: str = ""
    """Id of the tool call."""
    name: str = ""
    """Name of the called tool."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    complete: bool = True
    """False if the token limit cut off the block."""
    outcome: ToolOutcome | None = None
    """Outcome of a call that this server has run."""

    @property
    def text(self) -> str:
        """Content so far: a text, or the arguments of a call as JSON."""
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
    """A block is final."""

    block: ContentBlock


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """A call of a closed block has run on this server."""

    block: ContentBlock


BlockEvent: TypeAlias = BlockOpened | BlockDelta | BlockClosed | BlockOutcome


class ContentBlocks:
    """The content of one choice, as blocks in their order."""

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
        """Add an event of this choice, and return the changes in order."""
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
            case ToolOutcome(call=call):
                changes = self._close()
                block = self._call(call)
                block.outcome = event
                return [*changes, BlockOutcome(block)]
            case PromptEcho(tokens=tokens):
                self.prompt = tokens
            case ChoiceEnd(reason=reason):
                self.end = event
                changes = []
                if not self.blocks:
                    changes = self._extend("text", "")
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
        if block is None:
            return []
        return [BlockClosed(block)]


class CollectedAnswer:
    """A whole answer, for responses that are not streamed."""

    def __init__(self, choices: int) -> None:
        self.choices = [ContentBlocks() for _ in range(choices)]
        self.first_text_s: float | None = None
        """Time of the first text, by time.perf_counter."""
        self.last_text_s = 0.0

    def add(self, event: OutputEvent) -> None:
        """Add the next event of the generation."""
        if isinstance(event, Text):
            self.last_text_s = time.perf_counter()
            if self.first_text_s is None:
                self.first_text_s = self.last_text_s
        self.choices[event.choice].add(event)
