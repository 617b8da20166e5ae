"""Titles of unnamed conversations, from the first question."""

from typing import Final

from localchat.chat.conversation import Conversation, Node

_MAX_TITLE: Final = 60
_SEARCHED_CHARACTERS: Final = 10_000
"""Characters to search at the start of a question."""


def title_for(conversation: Conversation) -> str:
    """Return the title of the conversation, or one made from its first question.

    Uses the typed text, or the names of included files if nothing was typed. Empty without a question.
    """
    if conversation.title:
        return conversation.title
    # A copy, because another thread may add the answer meanwhile.
    for node in list(conversation.nodes.values()):
        if node.message.role == "user":
            return title_of(_typed_text(node)) or title_of(_labels(node))
    return ""


def _labels(question: Node) -> str:
    files = [item.label for item in question.inclusions]
    media = [item.name or item.kind for item in question.message.attachments]
    return ", ".join((*files, *media))


def _typed_text(question: Node) -> str:
    """Return the text without what it includes. A file inside a sentence is replaced by its name."""
    text = question.message.content
    position = 0
    typed = ""
    for item in sorted(question.inclusions, key=lambda item: item.start):
        typed += text[position : item.start]
        if item.path and typed.strip():
            typed += item.label
        position = max(position, item.end)
    return typed + text[position:]


def title_of(question: str) -> str:
    """Return the first line with a letter or digit, shortened at a word."""
    lines = (" ".join(line.split()) for line in question[:_SEARCHED_CHARACTERS].splitlines())
    line = next((line for line in lines if any(sign.isalnum() for sign in line)), "")
    line = line or " ".join(question[:_SEARCHED_CHARACTERS].split())
    if len(line) <= _MAX_TITLE:
        return line
    title = line[: _MAX_TITLE - 1]
    words = title.rpartition(" ")[0]
    if len(words) > _MAX_TITLE // 2:
        title = words
    return f"{title}…"
