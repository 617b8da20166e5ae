"""Puts what a question gets of documents (`@name`) before it."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from localchat.chat.conversation import Conversation, Inclusion, Node
from localchat.chat.prompt_messages import sent_nodes
from localchat.documents.library import DocumentLibrary
from localchat.engine.interface import Engine
from localchat.session.context import SessionContext
from localchat.session.recorder import ConversationRecorder
from localchat.session.view import SessionView, node_blocks


class DocumentedQuestion(NamedTuple):
    """A question behind the documents that it mentions."""

    text: str
    inclusions: tuple[Inclusion, ...]
    labels: tuple[str, ...]
    """What was taken of each collection, on one line."""


def with_documents(
    library: DocumentLibrary,
    names: Sequence[str],
    text: str,
    asked: str,
    sent: Sequence[str],
    engine: Engine,
) -> DocumentedQuestion:
    """The text behind what it gets of these collections. Raises LocalchatError; blocks.

    `asked`: the part of the text that passages are found by. `sent`: the messages before it."""
    excerpts = [library.excerpt(name, asked, engine, sent) for name in names]
    before = ""
    inclusions = []
    for one in excerpts:
        if one.text:
            end = len(before) + len(one.text)
            inclusions.append(Inclusion(one.label, len(before), end))
            before += one.text
    return DocumentedQuestion(
        before + text, tuple(inclusions), tuple(one.label for one in excerpts)
    )


class QuestionHolder(Protocol):
    """A session, as far as documents change it."""

    context: SessionContext
    conversation: Conversation
    recorder: ConversationRecorder
    view: SessionView


async def include_documents(session: QuestionHolder, question: str, engine: Engine) -> None:
    """Put what a question gets of documents before it, unless it has that. Raises LocalchatError."""
    conversation = session.conversation
    library = session.context.library
    node = conversation.nodes[question]
    if "@" not in node.message.content:
        return
    found = await asyncio.to_thread(_documented, library, conversation, node, engine)
    if found is not None:
        conversation.put(found)
        session.recorder.changed(found)
        for block in node_blocks(conversation, found):
            session.view.put(block)


def _documented(
    library: DocumentLibrary, conversation: Conversation, question: Node, engine: Engine
) -> Node | None:
    """A question with its documents; None where it mentions none. Raises LocalchatError; blocks."""
    content = question.message.content
    inclusions = question.inclusions
    names, text = library.mentions(content, [(one.start, one.end) for one in inclusions])
    if not names:
        return None
    # A mention is taken out before, between or behind included files, whose places move.
    moved = []
    at = 0
    for one in sorted(inclusions, key=lambda each: each.start):
        at = text.index(content[one.start : one.end], at)
        moved.append(msgspec.structs.replace(one, start=at, end=at + one.end - one.start))
        at += one.end - one.start
    asked = text
    for one in reversed(moved):
        asked = f"{asked[: one.start]} {asked[one.end :]}"
    sent = [node.message.content for node in sent_nodes(conversation) if node.id != question.id]
    found = with_documents(library, names, text, asked, sent, engine)
    shift = len(found.text) - len(text)
    kept = tuple(
        msgspec.structs.replace(one, start=one.start + shift, end=one.end + shift) for one in moved
    )
    message = msgspec.structs.replace(question.message, content=found.text)
    return msgspec.structs.replace(question, message=message, inclusions=(*found.inclusions, *kept))
