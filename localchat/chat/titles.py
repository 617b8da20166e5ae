"""Titles of conversations that nobody named, from the first question."""

from typing import Final

from localchat.chat.conversation import Conversation, Node

_LONGEST: Final = 60
_SHORT: Final = 120
_READ: Final = 10_000
"""Characters at each end of a question that are looked at."""
_ASKING: Final = ("?", "？")
_ENDING: Final = (*_ASKING, *'.!:…。！：`"”)')
"""Ends of a line that does not run on in the next."""


def title_for(conversation: Conversation) -> str:
    """The conversation's title, or one from its first question: what was typed, else the names of what it
    includes. Empty while there is no question."""
    if conversation.title:
        return conversation.title
    first = next((n for n in conversation.nodes.values() if n.message.role == "user"), None)
    if first is None:
        return ""
    return title_of(_as_typed(first)) or title_of(_labels(first))


def without_inclusions(question: Node) -> str:
    """A question as it was typed, without what it includes; the names of that, where nothing was typed."""
    return _as_typed(question).strip() or _labels(question)


def _labels(question: Node) -> str:
    return ", ".join(one.label for one in question.inclusions)


def _as_typed(question: Node) -> str:
    text = question.message.content
    at = 0
    parts = []
    for one in sorted(question.inclusions, key=lambda inclusion: inclusion.start):
        parts.append(text[at : one.start])
        at = max(at, one.end)
    return "".join((*parts, text[at:]))


def title_of(question: str) -> str:
    """The line of a question that asks, shortened at a word."""
    line = _asking_line(question) or " ".join(question[:200].split())
    if len(line) <= _LONGEST:
        return line
    start = line[: _LONGEST - 1]
    words = start.rpartition(" ")[0]
    return f"{words if len(words) > _LONGEST // 2 else start}…"


def _asking_line(question: str) -> str:
    """The first line with a letter or digit, or the last one if the question stands below its text.

    Such a line begins a sentence and ends with a question mark, or it is short and a paragraph of its own, as
    the first one is not."""
    lines = [" ".join(line.split()) for line in question[:_READ].splitlines()]
    first = next((n for n, line in enumerate(lines) if _says(line)), len(lines))
    if first == len(lines):
        return ""
    above, _, last = question[-_READ:].rstrip().rpartition("\n")
    last = " ".join(last.split())
    if not above.strip() or not _says(last) or lines[first].endswith((":", "：", *_ASKING)):
        return lines[first]
    apart = not above.rpartition("\n")[2].strip()
    if last.endswith(_ASKING) and (apart or above.rstrip().endswith(_ENDING)):
        return last
    below_text = apart and "".join(lines[first + 1 : first + 2])
    if below_text and len(last) <= _SHORT:
        return last
    return lines[first]


def _says(line: str) -> bool:
    return any(sign.isalnum() for sign in line)
