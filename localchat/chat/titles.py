"""Titles of conversations that nobody named, from the first question."""

from typing import Final

from localchat.chat.conversation import Conversation, Node

_LONGEST: Final = 60


def title_for(conversation: Conversation) -> str:
    """The conversation's title, or one from its first question: what was typed, else the names of what it
    includes. Empty while there is no question."""
    if conversation.title:
        return conversation.title
    first = next((n for n in conversation.nodes.values() if n.message.role == "user"), None)
    if first is None:
        return ""
    labels = ", ".join(one.label for one in first.inclusions)
    return title_of(_without_inclusions(first)) or title_of(labels)


def _without_inclusions(question: Node) -> str:
    """The text of a question as it was typed, without what it includes."""
    text, at, parts = question.message.content, 0, []
    for one in sorted(question.inclusions, key=lambda inclusion: inclusion.start):
        parts.append(text[at : one.start])
        at = max(at, one.end)
    return "".join((*parts, text[at:]))


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
