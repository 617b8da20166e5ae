"""An answer as blocks, one after the other: a text, a stretch of reasoning, a tool call.

Protocols that number the parts of an answer want each part opened, filled and closed before the next; what
an engine tells only changes its kind. An answer without anything in it is one empty text, because readers
take the first part without looking whether there is one.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from localchat.engine.events import Reasoning, Text, TokenLogprob, ToolCall
from localchat.server.generation import End, OutputEvent

Kind: TypeAlias = Literal["text", "reasoning", "call"]


@dataclass(eq=False, slots=True)
class Block:
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
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    block: Block
    piece: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Change: TypeAlias = Opened | Grown | Closed


class Blocks:
    """Of one answer with one choice. `blocks`: all so far; `end`: how it ended, once it has."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.end: End | None = None
        self._open: Block | None = None

    def take(self, told: OutputEvent) -> list[Change]:
        """What the next piece changes, in order."""
        match told:
            case Text(text=text, logprobs=logprobs) if text or logprobs:
                return self._grown("text", text, logprobs)
            case Reasoning(text=text) if text:
                return self._grown("reasoning", text)
            case ToolCall() if told.id:
                return self._opened(Block(len(self.blocks), "call", told.call, told.id, told.name))
            case ToolCall():
                block = self._open
                assert block is not None and block.call == told.call, "calls come one by one"
                return [self._more(block, told.arguments)]
            case End(reason=reason):
                self.end = told
                changes: list[Change] = [] if self.blocks else self._grown("text", "")
                if self._open is not None:
                    self._open.whole = reason != "length"
                return [*changes, *self._closed()]
        return []

    def _grown(
        self, kind: Kind, text: str, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> list[Change]:
        changes: list[Change] = []
        block = self._open
        if block is None or block.kind != kind:
            block = Block(len(self.blocks), kind)
            changes = self._opened(block)
        if text or logprobs:
            changes.append(self._more(block, text, logprobs))
        return changes

    def _opened(self, block: Block) -> list[Change]:
        changes = self._closed()
        self._open = block
        self.blocks.append(block)
        return [*changes, Opened(block)]

    def _more(self, block: Block, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> Grown:
        block.pieces.append(text)
        block.logprobs += logprobs
        return Grown(block, text, logprobs)

    def _closed(self) -> list[Change]:
        block, self._open = self._open, None
        return [] if block is None else [Closed(block)]
