"""Includes passages of documents (`@name`) in a question."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from localchat.chat.conversation import Conversation, Inclusion, Node, Question
from localchat.chat.prompt_messages import sent_nodes
from localchat.documents.library import DocumentLibrary
from localchat.engine.interface import Engine
from localchat.session.interface import Session
from localchat.session.view import node_blocks


class DocumentedQuestion(NamedTuple):
    """A question after the passages of the documents that it mentions."""

    question: Question
    labels: tuple[str, ...]
    """Names of the passages, one line for each collection."""


def with_documents(
    library: DocumentLibrary,
    names: Sequence[str],
    question: Question,
    query: str,
    sent: Sequence[str],
    engine: Engine,
) -> DocumentedQuestion:
    """Put passages of these collections before a question. Blocks. Raises LocalchatError.

    `query` is the part of its text that selects the passages. `sent` are the messages before it.
    """
    excerpts = [library.excerpt(name, query, engine, sent) for name in names]
    passages = ""
    inclusions = []
    for excerpt in excerpts:
        if excerpt.text:
            end = len(passages) + len(excerpt.text)
            inclusions.append(Inclusion(excerpt.label, len(passages), end))
            passages += excerpt.text
    labels = tuple(excerpt.label for excerpt in excerpts)
    # The passages come first and move what the question already includes.
    moved = question.moved(passages + question.text, len(passages))
    inclusions += moved.inclusions
    return DocumentedQuestion(moved._replace(inclusions=tuple(inclusions)), labels)


async def include_documents(session: Session, question: str, engine: Engine) -> None:
    """Put the passages of mentioned documents before a question, once. Raises LocalchatError."""
    conversation = session.conversation
    library = session.context.library
    node = conversation.nodes[question]
    # The result of a tool must not choose documents.
    if node.message.role != "user" or "@" not in node.message.content:
        return
    documented = await asyncio.to_thread(_documented, library, conversation, node, engine)
    if documented is not None:
        conversation.put(documented)
        session.recorder.changed(documented)
        for block in node_blocks(conversation, documented):
            session.view.put(block)


def _documented(
    library: DocumentLibrary, conversation: Conversation, question: Node, engine: Engine
) -> Node | None:
    """Return a question with its documents. None if it mentions none. Blocks. Raises LocalchatError."""
    content = question.message.content
    included = question.inclusions
    spared = [(item.start, item.end) for item in included]
    names, text = library.mentions(content, spared)
    if not names:
        return None
    files = _moved_inclusions(included, content, text)
    # Passages are selected by what the user typed, not by the text of included files.
    query = text
    for item in reversed(files):
        query = f"{query[: item.start]} {query[item.end :]}"
    sent = [node.message.content for node in sent_nodes(conversation) if node.id != question.id]
    attachments = tuple(
        msgspec.structs.replace(
            item, position=len(library.mentions(content[: item.position], spared)[1])
        )
        for item in question.message.attachments
    )
    unmentioned = Question(text, tuple(files), attachments)
    documented = with_documents(library, names, unmentioned, query, sent, engine).question
    message = msgspec.structs.replace(
        question.message, content=documented.text, attachments=documented.attachments
    )
    return msgspec.structs.replace(question, message=message, inclusions=documented.inclusions)


def _moved_inclusions(included: Sequence[Inclusion], content: str, text: str) -> list[Inclusion]:
    """Return the inclusions of `content` at their positions in `text`, which lacks the mentions."""
    moved = []
    position = 0
    for item in sorted(included, key=lambda item: item.start):
        length = item.end - item.start
        position = text.index(content[item.start : item.end], position)
        moved.append(msgspec.structs.replace(item, start=position, end=position + length))
        position += length
    return moved
