"""A conversation: messages in a tree, of which one path is shown and sent.

An edited question and a regenerated answer are siblings of what they replace, so nothing that was said is
lost. The path runs from a root to the head; walking to another branch only moves the head.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from localchat.engine.events import Done
from localchat.engine.request import Message
from localchat.errors import UsageError

NodeState: TypeAlias = Literal["open", "whole", "stopped", "length", "failed"]
"""`open`: still being written (or the program died while it was)."""


class Inclusion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stretch of a user message that a screen folds: a file or a long paste. `start`, `end`: characters of
    the message's content."""

    label: str
    start: int
    end: int
    path: str = ""


class AnswerMetrics(msgspec.Struct, frozen=True):
    """What was measured while an answer was made, and with what. `done` as the engine said it; None where
    the answer did not end by itself. `draw_seed`: with which the answer can be drawn again."""

    model: str
    backend: str
    quantization: str
    kv_type: str
    draw_seed: int
    done: Done | None


class Node(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message in the tree. `replaces`: ids of messages that this one stands for when it is a summary.
    `error`: why it failed, one sentence."""

    id: str
    parent: str | None
    message: Message
    state: NodeState = "whole"
    created_s: float = 0.0
    metrics: AnswerMetrics | None = msgspec.field(default=None, name="figures")
    """`figures` in files and exports."""
    inclusions: tuple[Inclusion, ...] = ()
    replaces: tuple[str, ...] = ()
    error: str = ""


class Policy(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the user chose for this conversation when it outgrew the context. `ask`: nothing is sent, a notice
    offers the choices. `left_out`: ids of messages that are not sent (dimmed on the screen); `left_out_tokens`:
    what they took when they were left out."""

    kind: Literal["ask", "leave_out_oldest"] = "ask"
    left_out: tuple[str, ...] = ()
    left_out_tokens: int = 0


def new_id() -> str:
    """An id that sorts by time of birth: 48 bits of milliseconds, 80 of chance, as 32 hex digits."""
    return f"{int(time.time() * 1000):012x}{os.urandom(10).hex()}"


@dataclass(slots=True)
class Conversation:
    """See the module. `nodes` by id, in order of birth; `head`: last node of the shown path, None when
    empty. `model`: word of the model that answers; `system`: instructions, sent first."""

    id: str = field(default_factory=new_id)
    title: str = ""
    created_s: float = field(default_factory=time.time)
    updated_s: float = field(default_factory=time.time)
    model: str = ""
    system: str = ""
    policy: Policy = field(default_factory=Policy)
    nodes: dict[str, Node] = field(default_factory=dict)
    head: str | None = None

    def path(self) -> tuple[Node, ...]:
        """The shown messages, oldest first."""
        steps: list[Node] = []
        at = self.head
        while at is not None:
            steps.append(self.nodes[at])
            at = self.nodes[at].parent
        return tuple(reversed(steps))

    def add(
        self,
        message: Message,
        *,
        parent: str | None,
        state: NodeState = "whole",
        inclusions: Iterable[Inclusion] = (),
        replaces: Iterable[str] = (),
    ) -> Node:
        """A new message after `parent`, shown from now on."""
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
        """Replace the node of this id by a newer state of it (text grew, metrics came)."""
        self.nodes[node.id] = node
        self.updated_s = time.time()

    def remove_last(self, id_: str) -> None:
        """Forget a message that was never sent and that nothing follows."""
        assert not self.children(id_)
        self.head = self.nodes.pop(id_).parent

    def siblings(self, id_: str) -> tuple[Node, ...]:
        """All versions of a message, itself included, in order of birth."""
        node = self.nodes[id_]
        return tuple(
            other
            for other in self.nodes.values()
            if other.parent == node.parent and other.message.role == node.message.role
        )

    def children(self, id_: str | None) -> tuple[Node, ...]:
        """The messages right after one (after nothing: the roots), in order of birth."""
        return tuple(node for node in self.nodes.values() if node.parent == id_)

    def show(self, id_: str) -> None:
        """Walk to the branch of a message: the path follows the newest children from there."""
        if id_ not in self.nodes:
            raise UsageError(f"there is no message {id_!r} in this conversation")
        while after := self.children(id_):
            id_ = after[-1].id
        self.head = id_

    def back_to(self, id_: str | None) -> None:
        """End the path at a message (None: before the first). What came after stays in the tree."""
        if id_ is not None and id_ not in self.nodes:
            raise UsageError(f"there is no message {id_!r} in this conversation")
        self.head = id_

    def repair(self) -> None:
        """Make a whole of what came from a file: a message whose parent is lost begins a path of its own,
        and a lost head is the newest message."""
        for node in list(self.nodes.values()):
            if node.parent is not None and node.parent not in self.nodes:
                self.nodes[node.id] = msgspec.structs.replace(node, parent=None)
        if self.head not in self.nodes:
            self.head = next(reversed(self.nodes), None)
