"""Makes the messages of a prompt: the path, without what is left out, summaries in place of what they replace.

A summary goes into the first user message that is still sent, where every chat template accepts it; many
allow no second system message, and some none at all.
"""

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from localchat.chat.conversation import Conversation, Node
from localchat.engine.repetition import without_repeats
from localchat.engine.request import Message

Exchange: TypeAlias = tuple[Node, ...]
"""A question with everything up to the next one."""

SUMMARY_ROLE: Final = "system"
"""The role of a summary's own message, which is never sent by itself."""
_BEFORE_SUMMARY: Final = "Summary of the conversation so far:"
_AFTER_SUMMARY: Final = "The conversation goes on:"


def sent_messages(conversation: Conversation) -> tuple[Message, ...]:
    """The messages for an engine: instructions, then the shown path.

    An empty answer (stopped or failed at once) is not sent; questions that then follow each other are joined.
    """
    return as_sent(conversation, sent_nodes(conversation))


def as_sent(conversation: Conversation, nodes: Sequence[Node]) -> tuple[Message, ...]:
    """The messages for some nodes of the path."""
    messages: list[Message] = []
    if conversation.system:
        messages.append(Message("system", conversation.system))
    opening = _summaries(conversation)
    for node in nodes:
        message = without_loop(node)
        if message.role == "assistant" and _is_empty(message):
            continue
        if message.role == "user" and opening:
            message = msgspec.structs.replace(message, content=f"{opening}\n\n{message.content}")
            opening = ""
        if message.role == "user" and messages and messages[-1].role == "user":
            joined = f"{messages[-1].content}\n\n{message.content}"
            messages[-1] = msgspec.structs.replace(message, content=joined)
        else:
            messages.append(message)
    if opening:
        messages.append(Message("user", opening))
    return tuple(messages)


def without_loop(node: Node) -> Message:
    """Return a message without the repeats that end it: in a prompt they would begin the next loop."""
    message = node.message
    repetition = node.end.repetition if node.end is not None else None
    content = without_repeats(message.content, repetition)
    reasoning = without_repeats(message.reasoning, repetition)
    if (content, reasoning) == (message.content, message.reasoning):
        return message
    return msgspec.structs.replace(message, content=content, reasoning=reasoning)


def sent_nodes(conversation: Conversation) -> tuple[Node, ...]:
    """The nodes of the path that are sent as they are, without summaries."""
    unsent = unsent_ids(conversation)
    return tuple(
        node for node in conversation.path() if node.id not in unsent and not node.replaces
    )


def unsent_ids(conversation: Conversation) -> frozenset[str]:
    """Ids on the path that are not sent (shown dimmed): left out, or replaced by a summary."""
    path = conversation.path()
    replaced = {id_ for node in path for id_ in node.replaces}
    gone = replaced.union(conversation.policy.left_out)
    return frozenset(node.id for node in path if node.id in gone)


def left_out(conversation: Conversation) -> tuple[Node, ...]:
    """The nodes of the path that the policy leaves out and no summary stands for."""
    path = conversation.path()
    replaced = {id_ for node in path for id_ in node.replaces}
    gone = set(conversation.policy.left_out) - replaced
    return tuple(node for node in path if node.id in gone)


def exchanges(nodes: Sequence[Node]) -> tuple[Exchange, ...]:
    """Nodes in groups that each begin with a question; what comes before the first one goes with it."""
    return tuple(_exchanges(nodes))


def _exchanges(nodes: Sequence[Node]) -> Iterator[Exchange]:
    group: list[Node] = []
    asked = False
    for node in nodes:
        if node.message.role == "user" and asked:
            yield tuple(group)
            group = []
        asked = asked or node.message.role == "user"
        group.append(node)
    if group:
        yield tuple(group)


def _summaries(conversation: Conversation) -> str:
    """The summaries on the path that no later one replaces."""
    path = conversation.path()
    replaced = {id_ for node in path for id_ in node.replaces}
    texts = [node.message.content for node in path if node.replaces and node.id not in replaced]
    if not texts:
        return ""
    return "\n\n".join([_BEFORE_SUMMARY, *texts, _AFTER_SUMMARY])


def _is_empty(message: Message) -> bool:
    return not (message.content or message.reasoning or message.tool_calls)
