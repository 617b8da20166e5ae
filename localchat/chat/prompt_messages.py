"""Builds the messages of a prompt from the path, without left-out messages and with summaries.

A summary becomes part of the first user message that is still sent, because every chat template accepts it
there. Many templates reject a second system message, and some reject any.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import takewhile
from typing import Final, TypeAlias

import msgspec

from localchat.chat.conversation import Conversation, Node
from localchat.engine.attachments import append_content, prepend_text
from localchat.engine.repetition import without_repeats
from localchat.engine.request import Message, Messages
from localchat.errors import LocalchatError

Exchange: TypeAlias = tuple[Node, ...]
"""A question with everything up to the next question."""

Count: TypeAlias = Callable[[Messages], int]
"""Counts the tokens of a prompt. Returns more than any context for one that is too long to count."""

SUMMARY_ROLE: Final = "system"
"""Role of a summary's own message, which is never sent by itself."""
_BEFORE_SUMMARY: Final = "Summary of the conversation so far:"
_NOT_SENT: Final = "(an attachment that is not sent)"
MEDIA_LEFT_OUT: Final = (
    "This model cannot read the pictures or recordings of earlier questions, so they are not sent."
)
_NO_RESULT: Final = "This call was not run."
_AFTER_SUMMARY: Final = "The conversation goes on:"


def sent_messages(conversation: Conversation, unread: Collection[str] = ()) -> tuple[Message, ...]:
    """Return the messages for an engine: instructions, then the shown path.

    Empty answers, which were stopped or failed at once, are not sent. Adjacent questions are then joined.
    Questions before the last one lose their attachments of the kinds `unread`.
    """
    nodes = sent_nodes(conversation)
    if unread:
        earlier = exchanges(nodes)[:-1]
        ids = {node.id for exchange in earlier for node in exchange}
        nodes = tuple(_without_media(node, unread) if node.id in ids else node for node in nodes)
    return as_sent(conversation, nodes)


def unread_kind(conversation: Conversation, problem: LocalchatError) -> str:
    """Return the kind of attachments that a model has refused, if earlier questions have such. Else empty."""
    kind = str(problem.details.get("media_kind", ""))
    earlier = exchanges(sent_nodes(conversation))[:-1]
    messages = (node.message for exchange in earlier for node in exchange)
    if any(item.kind == kind for message in messages for item in message.attachments):
        return kind
    return ""


def _without_media(node: Node, kinds: Collection[str]) -> Node:
    message = node.message
    attachments = tuple(item for item in message.attachments if item.kind not in kinds)
    if attachments == message.attachments:
        return node
    content = message.content.strip() or _NOT_SENT
    message = msgspec.structs.replace(message, content=content, attachments=attachments)
    return msgspec.structs.replace(node, message=message)


def as_sent(conversation: Conversation, nodes: Sequence[Node]) -> tuple[Message, ...]:
    """Return the messages for some nodes of the path."""
    messages: list[Message] = []
    if conversation.system:
        messages.append(Message("system", conversation.system))
    opening = ""
    if summaries := [node.message.content for node in sent_summaries(conversation)]:
        opening = "\n\n".join([_BEFORE_SUMMARY, *summaries, _AFTER_SUMMARY])
    for node in nodes:
        message = without_loop(node)
        if message.role == "assistant" and _is_empty(message):
            continue
        if message.role == "user" and opening:
            message = prepend_text(message, f"{opening}\n\n")
            opening = ""
        if message.role == "user" and messages and messages[-1].role == "user":
            messages[-1] = append_content(messages[-1], message, "\n\n")
        else:
            messages.append(message)
    if opening:
        messages.append(Message("user", opening))
    return _with_results(messages)


def _with_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Add results of tool calls that a kill of the program left without one. Templates need them."""
    complete: list[Message] = []
    for index, message in enumerate(messages):
        complete.append(message)
        following = takewhile(lambda other: other.role == "tool", messages[index + 1 :])
        answered = {other.tool_call_id for other in following if message.tool_calls}
        complete += (
            Message("tool", _NO_RESULT, tool_call_id=call.id, name=call.name)
            for call in message.tool_calls
            if call.id not in answered
        )
    return tuple(complete)


def without_loop(node: Node) -> Message:
    """Return a message without the repeats at its end, which would start the next loop."""
    message = node.message
    repetition = None
    if node.end is not None:
        repetition = node.end.repetition
    content = without_repeats(message.content, repetition)
    reasoning = without_repeats(message.reasoning, repetition)
    if (content, reasoning) == (message.content, message.reasoning):
        return message
    return msgspec.structs.replace(message, content=content, reasoning=reasoning)


def sent_nodes(conversation: Conversation) -> tuple[Node, ...]:
    """Return the nodes of the path that are sent, without summaries."""
    unsent = unsent_ids(conversation)
    return tuple(
        node for node in conversation.path() if node.id not in unsent and not node.replaces
    )


def unsent_ids(conversation: Conversation) -> frozenset[str]:
    """Return the ids on the path that are left out or replaced by a summary."""
    path = conversation.path()
    replaced = {id_ for node in path for id_ in node.replaces}
    unsent = replaced.union(conversation.policy.left_out)
    return frozenset(node.id for node in path if node.id in unsent)


def left_out(conversation: Conversation) -> tuple[Node, ...]:
    """Return the nodes of the path that the policy leaves out and no summary replaces."""
    path = conversation.path()
    replaced = {id_ for node in path for id_ in node.replaces}
    ids = set(conversation.policy.left_out) - replaced
    return tuple(node for node in path if node.id in ids)


def exchanges(nodes: Sequence[Node]) -> tuple[Exchange, ...]:
    """Group nodes by question. Messages before the first question belong to it."""
    return tuple(_exchanges(nodes))


def _exchanges(nodes: Sequence[Node]) -> Iterator[Exchange]:
    exchange: list[Node] = []
    has_question = False
    for node in nodes:
        if node.message.role == "user" and has_question:
            yield tuple(exchange)
            exchange = []
        has_question = has_question or node.message.role == "user"
        exchange.append(node)
    if exchange:
        yield tuple(exchange)


def sent_summaries(conversation: Conversation) -> tuple[Node, ...]:
    """Return the summaries on the path that no later one replaces."""
    path = conversation.path()
    replaced = {id_ for node in path for id_ in node.replaces}
    return tuple(node for node in path if node.replaces and node.id not in replaced)


def _is_empty(message: Message) -> bool:
    return not (message.content or message.reasoning or message.tool_calls or message.attachments)
