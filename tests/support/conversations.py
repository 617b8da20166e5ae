"""Shared by tests: kept, talk."""

from localchat.chat.conversation import Conversation
from localchat.engine.request import Message
from localchat.history.store import History
from tests.support.histories import record


def talk(*texts: str, title: str = "") -> Conversation:
    """Questions and answers in turn."""
    conversation = Conversation(title=title)
    for number, text in enumerate(texts):
        role = "assistant" if number % 2 else "user"
        conversation.add(Message(role, text), parent=conversation.head)
    return conversation


def kept(history: History, *texts: str, title: str = "") -> Conversation:
    conversation = talk(*texts, title=title)
    record(history, conversation, conversation.nodes.values())
    return conversation
