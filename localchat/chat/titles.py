"""Titles of conversations that nobody named, from the first question."""

from typing import Final

from localchat.chat.conversation import Conversation

_LONGEST: Final = 60


def title_for(conversation: Conversation) -> str:
    """The conversation's title, or one from its first question; empty while there is none."""
    if conversation.title:
        return conversation.title
    first = next(
        (
            node.message.content
            for node in conversation.nodes.values()
            if node.message.role == "user"
        ),
        "",
    )
    return title_of(first)


def title_of(question: str) -> str:
    """The first line of a question with a letter or digit, shortened at a word."""
    lines = (" ".join(line.split()) for line in question[:10_000].splitlines())
    line = next((line for line in lines if any(sign.isalnum() for sign in line)), "")
    line = line or " ".join(question[:200].split())
    if len(line) <= _LONGEST:
        return line
    start = line[: _LONGEST - 1]
    words = start.rpartition(" ")[0]
    return f"{words if len(words) > _LONGEST // 2 else start}…"
