"""The first fenced code block of a Markdown text (CommonMark's fences; the indentation of the opening fence
is taken off the lines)."""

import re
from typing import Final

_OPEN: Final = re.compile(r"^( {0,3})(`{3,}(?=[^`\n]*$)|~{3,})[^\n]*$", re.MULTILINE)


def first_code_block(text: str, *, finished: bool = True) -> str | None:
    """The code between the first fences, without them; None where there is none. A block that is never
    closed reaches to the end of a finished text, and is none yet in an unfinished one."""
    opening = _OPEN.search(text)
    if opening is None:
        return None
    indent, fence = opening.group(1), opening.group(2)
    code: list[str] = []
    for line in text[opening.end() + 1 :].splitlines(keepends=True):
        bare = line.strip()
        closes = bare and not bare.strip(fence[0]) and len(bare) >= len(fence)
        if closes and len(line) - len(line.lstrip(" ")) <= 3 and (finished or line.endswith("\n")):
            return "".join(code)
        code.append(_without(indent, line))
    return "".join(code) if finished else None


def _without(indent: str, line: str) -> str:
    spaces = len(line) - len(line.lstrip(" "))
    return line[min(len(indent), spaces) :]
