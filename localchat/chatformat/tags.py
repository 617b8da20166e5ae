"""Where tags stand in a text that arrives in pieces."""

from collections.abc import Iterable


def first(text: str, tags: Iterable[str]) -> tuple[int, str]:
    """The earliest tag, the longest where two begin together; (0, "") where there is none."""
    found = [(at, -len(tag), tag) for tag in tags if (at := text.find(tag)) >= 0]
    if not found:
        return 0, ""
    at, _, tag = min(found)
    return at, tag


def half(text: str, tags: tuple[str, ...]) -> int:
    """Where the beginning of a tag stands at the end of the text; its length where there is none."""
    longest = max((len(tag) for tag in tags), default=1)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[at:]) for tag in tags):
            return at
    return len(text)
