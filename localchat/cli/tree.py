"""A conversation with its branches, as an outline."""

from collections.abc import Iterator

from localchat.chat.conversation import Conversation, Node
from localchat.sanitize import sanitize_line

_SHOWN = 60


def outline(conversation: Conversation) -> Iterator[str]:
    """A line a message. A branch is set in by two where several messages follow one; `*` marks the path."""
    shown = {node.id for node in conversation.path()}
    children: dict[str | None, list[Node]] = {}
    for node in conversation.nodes.values():
        children.setdefault(node.parent, []).append(node)
    waiting = [(node, 0) for node in reversed(children.get(None, []))]
    while waiting:  # no recursion: a path can be thousands of messages long
        node, depth = waiting.pop()
        yield f"{'*' if node.id in shown else ' '} {'  ' * depth}{_line(node)}"
        after = children.get(node.id, [])
        deeper = depth + (len(after) > 1)
        waiting += [(child, deeper) for child in reversed(after)]


def _line(node: Node) -> str:
    text = " ".join(node.message.content.split())
    text = f"{text[: _SHOWN - 1]}…" if len(text) > _SHOWN else text
    who = "summary" if node.replaces else node.message.role
    ending = (
        "" if node.state == "whole" else f" [{'stopped' if node.state == 'open' else node.state}]"
    )
    return sanitize_line(f"{who}: {text}{ending}")
