"""Conversation: a tree of messages, of which one path is shown and sent.

An edited question and a regenerated answer are siblings of what they replace, so nothing is lost. The path
runs from a root to the head. Switching to another branch only moves the head.
"""

import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

import msgspec

from localchat.engine.attachments import moved
from localchat.engine.events import Done, Finished, FinishReason
from localchat.engine.request import Attachment, Message
from localchat.errors import UsageError

if TYPE_CHECKING:
    from localchat.engine.interface import EngineInfo

NodeState: TypeAlias = Literal["open", "whole", "stopped", "length", "failed"]
"""An `open` message is being written, or the program died meanwhile."""
END_STATES: "Final[Mapping[FinishReason, NodeState]]" = {
    "stop": "whole",
    "tool_calls": "whole",
    "length": "length",
    "repetition": "length",
    "cancelled": "stopped",
}
"""State of an answer by the reason of its end."""


class Inclusion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file or a long paste inside a user message, which a screen folds."""

    label: str
    start: int
    """Index of the first character in the message's content."""
    end: int
    path: str = ""


class Question(NamedTuple):
    """A question to send."""

    text: str = ""
    inclusions: tuple[Inclusion, ...] = ()
    attachments: tuple[Attachment, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.attachments)

    def moved(self, text: str, characters: int) -> "Question":
        """Return the question with another text, in which everything comes this many characters later."""
        inclusions = tuple(
            msgspec.structs.replace(item, start=item.start + characters, end=item.end + characters)
            for item in self.inclusions
        )
        return Question(text, inclusions, moved(self.attachments, characters))

    def stripped(self) -> "Question":
        """Return a question that includes no text, without the white space around it."""
        text = self.text.strip()
        lead = len(self.text) - len(self.text.lstrip())
        attachments = tuple(
            msgspec.structs.replace(item, position=min(max(item.position - lead, 0), len(text)))
            for item in self.attachments
        )
        return Question(text, (), attachments)

    @property
    def message(self) -> Message:
        """The message of the user."""
        return Message("user", self.text, attachments=self.attachments)


NO_QUESTION: Final = Question()


class AnswerMetrics(msgspec.Struct, frozen=True):
    """Measurements of an answer, and the model that wrote it."""

    model: str
    backend: str
    quantization: str
    kv_type: str
    draw_seed: int
    """Seed that samples the same answer again."""
    done: Done | None
    """The engine's last event. None if the answer did not end by itself."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters of the load, as `name.gguf:scale`."""

    @classmethod
    def of(cls, info: "EngineInfo", draw_seed: int, done: Done | None) -> "AnswerMetrics":
        """Return the metrics of an answer by this engine."""
        return cls(
            model=info.model,
            backend=info.backend,
            quantization=info.quantization,
            kv_type=info.kv_type,
            draw_seed=draw_seed,
            done=done,
            adapters=info.adapters,
        )


class ToolRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a tool call went. Its node has the result as a message of the role `tool`."""

    state: Literal["asking", "running", "done", "failed", "refused"]
    title: str = ""
    """The call on one line. Not sanitized."""
    seconds: float = 0.0
    characters: int = 0
    """Length of the whole result, of which the model may have seen a part."""


class Node(msgspec.Struct, frozen=True, omit_defaults=True):
    """Message in the tree."""

    id: str
    parent: str | None
    message: Message
    state: NodeState = "whole"
    created_s: float = 0.0
    metrics: AnswerMetrics | None = msgspec.field(default=None, name="figures")
    """Named `figures` in files and exports."""
    inclusions: tuple[Inclusion, ...] = ()
    replaces: tuple[str, ...] = ()
    """Ids of the messages that a summary replaces."""
    error: str = ""
    """Why the answer failed, as a sentence."""
    end: Finished | None = None
    """End of an answer that a limit or the loop guard ended."""
    run: ToolRun | None = None
    """Set for the result of a tool call."""


class Policy(msgspec.Struct, frozen=True, omit_defaults=True):
    """The user's choice for a conversation that outgrows the context."""

    kind: Literal["ask", "leave_out_oldest"] = "ask"
    """`ask` sends nothing and shows the choices in a notice."""
    left_out: tuple[str, ...] = ()
    """Ids of messages that are not sent (dimmed on the screen)."""
    left_out_tokens: int = 0
    """Tokens of those messages when they were left out."""


def new_id() -> str:
    """Return an id that sorts by creation time.

    Hex digits of 48 bits of milliseconds and 80 random bits.
    """
    # A clock before 1970 would make a minus sign, which begins a flag.
    milliseconds = max(int(time.time() * 1000), 0)
    return f"{milliseconds:012x}{os.urandom(10).hex()}"


class Conversation(msgspec.Struct):
    """A tree of messages with a title, a model and instructions."""

    id: str = msgspec.field(default_factory=new_id)
    title: str = ""
    created_s: float = msgspec.field(default_factory=time.time)
    updated_s: float = msgspec.field(default_factory=time.time)
    model: str = ""
    """Name of the model that answers."""
    system: str = ""
    """Instructions, sent first."""
    policy: Policy = msgspec.field(default_factory=Policy)
    nodes: dict[str, Node] = msgspec.field(default_factory=dict)
    """Nodes by id, in order of creation."""
    head: str | None = None
    """Last node of the shown path. None if the conversation is empty."""

    def path(self) -> tuple[Node, ...]:
        """Return the shown messages, oldest first."""
        path: list[Node] = []
        id_ = self.head
        while id_ is not None:
            node = self.nodes[id_]
            path.append(node)
            id_ = node.parent
        return tuple(reversed(path))

    def shows(self, id_: str) -> bool:
        """Whether a message is on the shown path."""
        return any(node.id == id_ for node in self.path())

    def add(
        self,
        message: Message,
        *,
        parent: str | None,
        state: NodeState = "whole",
        inclusions: Iterable[Inclusion] = (),
        replaces: Iterable[str] = (),
    ) -> Node:
        """Add a message after `parent` and show it."""
        if parent is not None and parent not in self.nodes:
            raise UsageError(f"there is no message {parent!r} in this conversation")
        self.updated_s = time.time()
        node = Node(
            new_id(),
            parent,
            message,
            state,
            self.updated_s,
            inclusions=tuple(inclusions),
            replaces=tuple(replaces),
        )
        self.nodes[node.id] = node
        self.head = node.id
        return node

    def put(self, node: Node) -> None:
        """Replace a node by a newer version with more text or metrics."""
        self.nodes[node.id] = node
        self.updated_s = time.time()

    def remove_last(self, id_: str) -> None:
        """Remove a message that was never sent and that nothing follows."""
        assert not self.children(id_)
        self.head = self.nodes.pop(id_).parent

    def siblings(self, id_: str) -> tuple[Node, ...]:
        """Return all versions of a message, itself included, in order of creation."""
        node = self.nodes[id_]
        return tuple(
            other
            for other in self.nodes.values()
            if other.parent == node.parent and other.message.role == node.message.role
        )

    def children(self, id_: str | None) -> tuple[Node, ...]:
        """Return the messages right after a message, or the roots (None), in order of creation."""
        return tuple(node for node in self.nodes.values() if node.parent == id_)

    def below(self, ids: Iterable[str]) -> frozenset[str]:
        """Return these messages and all messages after them, on every branch."""
        members = set(ids)
        # Parents are created before their children.
        for node in self.nodes.values():
            if node.parent in members:
                members.add(node.id)
        return frozenset(members)

    def results(self, id_: str) -> dict[str, Node]:
        """Return the results of a message's tool calls by the id of the call, on its newest branch."""
        results: dict[str, Node] = {}
        while after := [node for node in self.children(id_) if node.message.role == "tool"]:
            node = after[-1]
            results[node.message.tool_call_id] = node
            id_ = node.id
        return results

    def show(self, id_: str) -> None:
        """Switch to the branch of a message. The path continues with the newest children."""
        if id_ not in self.nodes:
            raise UsageError(f"there is no message {id_!r} in this conversation")
        while after := self.children(id_):
            id_ = after[-1].id
        self.head = id_

    def back_to(self, id_: str | None) -> None:
        """End the path at a message, or before the first one (None). Later messages stay in the tree."""
        if id_ is not None and id_ not in self.nodes:
            raise UsageError(f"there is no message {id_!r} in this conversation")
        self.head = id_

    def repair(self) -> None:
        """Make a conversation from a file consistent.

        A message whose parent is lost becomes a root; a lost head becomes the newest message. Without a head,
        every message was undone.
        """
        for node in list(self.nodes.values()):
            if node.parent is not None and node.parent not in self.nodes:
                self.nodes[node.id] = msgspec.structs.replace(node, parent=None)
        if self.head is not None and self.head not in self.nodes:
            self.head = next(reversed(self.nodes), None)
