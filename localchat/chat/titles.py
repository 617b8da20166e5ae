"""Titles of unnamed conversations, from the first question."""

from typing import Final

from localchat.chat.conversation import Conversation, Node

_MAX_TITLE: Final = 60
_MAX_LAST_LINE: Final = 120
_SEARCHED_CHARACTERS: Final = 10_000
"""Characters to search at each end of a question."""
_QUESTION_MARKS: Final = ("?", "？")
_LINE_ENDS: Final = (*_QUESTION_MARKS, *'.!:…。！：`"”)')
"""Last characters of a line whose sentence ends there."""


def title_for(conversation: Conversation) -> str:
    """Return the title of the conversation, or one made from its first question.

    Uses the typed text, or the names of included files if nothing was typed. Empty without a question.
    """
    if conversation.title:
        return conversation.title
    for node in conversation.nodes.values():
        if node.message.role == "user":
            return title_of(_typed_text(node)) or title_of(_labels(node))
    return ""


def _labels(question: Node) -> str:
    files = [item.label for item in question.inclusions]
    media = [item.name or item.kind for item in question.message.attachments]
    return ", ".join((*files, *media))


def _typed_text(question: Node) -> str:
    text = question.message.content
    position = 0
    parts = []
    for item in sorted(question.inclusions, key=lambda item: item.start):
        parts.append(text[position : item.start])
        position = max(position, item.end)
    return "".join((*parts, text[position:]))


def title_of(question: str) -> str:
    """Return the line that asks the question, shortened at a word."""
    line = _asking_line(question) or " ".join(question[:200].split())
    if len(line) <= _MAX_TITLE:
        return line
    title = line[: _MAX_TITLE - 1]
    words = title.rpartition(" ")[0]
    if len(words) > _MAX_TITLE // 2:
        title = words
    return f"{title}…"


def _asking_line(question: str) -> str:
    """Return the first line with a letter or digit, or the last line.

    The last line is the question if it is a sentence of its own and ends with a question mark, or if it is
    short and, unlike the first line, a paragraph of its own.
    """
    lines = [" ".join(line.split()) for line in question[:_SEARCHED_CHARACTERS].splitlines()]
    first = next((n for n, line in enumerate(lines) if _has_text(line)), len(lines))
    if first == len(lines):
        return ""
    above, _, last = question[-_SEARCHED_CHARACTERS:].rstrip().rpartition("\n")
    last = " ".join(last.split())
    if (
        not above.strip()
        or not _has_text(last)
        or lines[first].endswith((":", "：", *_QUESTION_MARKS))
    ):
        return lines[first]
    is_paragraph = not above.rpartition("\n")[2].strip()
    if last.endswith(_QUESTION_MARKS) and (is_paragraph or above.rstrip().endswith(_LINE_ENDS)):
        return last
    is_below_text = is_paragraph and "".join(lines[first + 1 : first + 2])
    if is_below_text and len(last) <= _MAX_LAST_LINE:
        return last
    return lines[first]


def _has_text(line: str) -> bool:
    return any(sign.isalnum() for sign in line)
