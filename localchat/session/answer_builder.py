"""Builds an answer from events: a node of the conversation and the blocks that show it."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from localchat.chat.answer_end import ended_early
from localchat.chat.conversation import (
    END_STATES,
    AnswerMetrics,
    Conversation,
    Node,
    NodeState,
)
from localchat.engine.events import Accepted, Done, Event, Finished, Reasoning, Text, ToolCall
from localchat.engine.interface import EngineInfo
from localchat.engine.request import CalledTool, Message
from localchat.session.blocks import AnswerBlock, ReasoningBlock, ToolCallBlock
from localchat.session.view import AnswerView, branch_of, call_id, node_blocks, reasoning_id


@dataclass(slots=True)
class _GrowingCall:
    """A tool call whose arguments arrive in pieces."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


class AnswerBuilder:
    """Builds an assistant node, which enters the conversation with its first token."""

    def __init__(
        self,
        conversation: Conversation,
        view: AnswerView,
        parent: str,
        continued: Node | None = None,
        choice: int = 0,
    ) -> None:
        """`parent` is the id of the question. `continued` is an answer to extend."""
        self._choice = choice
        self._conversation = conversation
        self._view = view
        self._parent = parent
        self.node = continued
        self._text: list[str] = []
        self._reasoning: list[str] = []
        if continued is not None:
            self._text.append(continued.message.content)
            self._reasoning.append(continued.message.reasoning)
        self._calls: dict[int, _GrowingCall] = {}
        self._accepted: Accepted | None = None
        self._done: Done | None = None
        self.finished: Finished | None = None
        """How the model ended the answer. None if it was interrupted."""
        self._thinking_since: float | None = None
        self._text_begun = False
        self._changed = False

    def take(self, event: Event) -> None:
        """Add the content of an event, and show it."""
        match event:
            case Accepted():
                self._accepted = event
            case Text(choice=self._choice, text=text) if text:
                self._begin_text()
                self._text.append(text)
                self._view.append_text(self._id, text)
            case Reasoning(choice=self._choice, text=text) if text:
                self._begin_reasoning()
                self._reasoning.append(text)
                self._view.append_text(reasoning_id(self._id), text)
            case ToolCall(choice=self._choice):
                self._take_call(event)
            case Finished(choice=self._choice):
                self.finished = event
            case Done():
                self._done = event
            case _:
                pass
        # Set it last, because another thread may take a snapshot at any time.
        self._changed = True

    def take_snapshot(self) -> Node | None:
        """Return the node so far. None if nothing arrived since the last snapshot."""
        if self.node is None or not self._changed:
            return None
        self._changed = False
        return self._put(self.node.metrics, "open", "")

    def end(self, info: EngineInfo | None, state: NodeState | None = None, error: str = "") -> Node:
        """Finish the node, show it and return it. `state` overrides how the model ended the answer."""
        if self.node is None:
            self._open()
        assert self.node is not None
        self._end_reasoning()
        metrics = None
        if info is not None and self._accepted is not None:
            metrics = AnswerMetrics.of(info, self._accepted.seed, self._done)
        if state is None:
            state = "whole"
            if self.finished is not None:
                state = END_STATES[self.finished.reason]
        node = self._put(metrics, state, error)
        for block in node_blocks(self._conversation, node):
            if isinstance(block, ReasoningBlock):
                continue  # finished already, with its duration
            if isinstance(block, AnswerBlock):
                self._begin_text()
                self._view.finish(block)
            elif isinstance(block, ToolCallBlock):
                self._view.put(block)
        return node

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    @property
    def _id(self) -> str:
        assert self.node is not None
        return self.node.id

    def _open(self) -> None:
        if self.node is None:
            message = Message("assistant")
            self.node = self._conversation.add(message, parent=self._parent, state="open")

    def _begin_text(self) -> None:
        self._open()
        self._end_reasoning()
        if not self._text_begun:
            self._text_begun = True
            assert self.node is not None
            # A continued answer has text, and no longer the line about its end.
            branch = branch_of(self._conversation, self.node)
            self._view.put(AnswerBlock(self._id, self.text, branch))

    def _begin_reasoning(self) -> None:
        self._open()
        if self._thinking_since is None:
            self._thinking_since = time.monotonic()
            if not any(self._reasoning):
                self._view.put(ReasoningBlock(reasoning_id(self._id), ""))

    def _end_reasoning(self) -> None:
        if self._thinking_since is not None:
            seconds = time.monotonic() - self._thinking_since
            self._thinking_since = None
            block = ReasoningBlock(reasoning_id(self._id), self.reasoning, seconds)
            self._view.finish(block)

    def _take_call(self, event: ToolCall) -> None:
        self._open()
        call = self._calls.setdefault(event.call, _GrowingCall())
        call.id = event.id or call.id
        call.name = event.name or call.name
        call.arguments.append(event.arguments)
        arguments = "".join(call.arguments)
        self._view.put(ToolCallBlock(call_id(self._id, event.call), call.name, arguments))

    def _put(self, metrics: AnswerMetrics | None, state: NodeState, error: str) -> Node:
        assert self.node is not None
        calls = tuple(
            CalledTool(call.name, "".join(call.arguments), call.id)
            for _, call in sorted(self._calls.items())
        )
        message = Message("assistant", self.text, reasoning=self.reasoning, tool_calls=calls)
        end = None
        if ended_early(self.finished):
            end = self.finished
        self.node = msgspec.structs.replace(
            self.node, message=message, metrics=metrics, state=state, error=error, end=end
        )
        self._conversation.put(self.node)
        return self.node


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """Join adjacent pieces of a text, and drop their log probabilities.

    A fast answer has several pieces per frame of the screen, which then cost the work of one.
    """
    for text_kind, group in groupby(events, _text_kind):
        if text_kind is None:
            yield from group
        else:
            kind, choice = text_kind
            yield kind(choice, "".join(event.text for event in group if isinstance(event, kind)))


def _text_kind(event: Event) -> tuple[type[Text] | type[Reasoning], int] | None:
    if isinstance(event, Text | Reasoning):
        return (type(event), event.choice)
    return None
