"""An answer as blocks, one after the other: a text, a stretch of reasoning, a tool call.

Protocols that number the parts of an answer want each part opened, filled and closed before the next; what
an engine tells only changes its kind. An answer without anything in it is one empty text, because readers
take the first part without looking whether there is one.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from localchat.engine.events import Reasoning, Text, TokenLogprob, ToolCall
from localchat.server.generation import ChoiceEnd, OutputEvent

Kind: TypeAlias = Literal["text", "reasoning", "call"]


@dataclass(eq=False, slots=True)
class ContentBlock:
    """index: its place in the answer. call: the number of a tool call in it, `id` and `name` are that call's.
    whole: whether the model ended it, rather than the limit of tokens."""

    index: int
    kind: Kind
    call: int = -1
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    whole: bool = True

    @property
    def text(self) -> str:
        """What it holds so far: text, or a call's arguments as JSON."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockOpened:
    block: ContentBlock


@dataclass(frozen=True, slots=True)
class BlockDelta:
    block: ContentBlock
    piece: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockClosed:
    block: ContentBlock


BlockEvent: TypeAlias = BlockOpened | BlockDelta | BlockClosed


class ContentBlocks:
    """Of one answer with one choice. `blocks`: all so far; `end`: how it ended, once it has."""

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        self.end: ChoiceEnd | None = None
        self._open: ContentBlock | None = None

    def take(self, told: OutputEvent) -> list[BlockEvent]:
        """What the next piece changes, in order."""
        match told:
            case Text(text=text, logprobs=logprobs) if text or logprobs:
                return self._grown("text", text, logprobs)
            case Reasoning(text=text) if text:
                return self._grown("reasoning", text)
            case ToolCall() if told.id:
                return self._opened(
                    ContentBlock(len(self.blocks), "call", told.call, told.id, told.name)
                )
            case ToolCall():
                block = self._open
                assert block is not None and block.call == told.call, "calls come one by one"
                return [self._more(block, told.arguments)]
            case ChoiceEnd(reason=reason):
                self.end = told
                changes: list[BlockEvent] = [] if self.blocks else self._grown("text", "")
                if self._open is not None:
                    self._open.whole = reason != "length"
                return [*changes, *self._closed()]
        return []

    def _grown(
        self, kind: Kind, text: str, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> list[BlockEvent]:
        changes: list[BlockEvent] = []
        block = self._open
        if block is None or block.kind != kind:
            block = ContentBlock(len(self.blocks), kind)
            changes = self._opened(block)
        if text or logprobs:
            changes.append(self._more(block, text, logprobs))
        return changes

    def _opened(self, block: ContentBlock) -> list[BlockEvent]:
        changes = self._closed()
        self._open = block
        self.blocks.append(block)
        return [*changes, BlockOpened(block)]

    def _more(
        self, block: ContentBlock, text: str, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> BlockDelta:
        block.pieces.append(text)
        block.logprobs += logprobs
        return BlockDelta(block, text, logprobs)

    def _closed(self) -> list[BlockEvent]:
        block, self._open = self._open, None
        return [] if block is None else [BlockClosed(block)]
