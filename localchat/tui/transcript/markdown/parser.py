"""markdown-it set up so that nothing of a text vanishes.

Its preset drops what is nested deeper than `maxNesting` without a word, and definitions of reference links
always. Here what is too deep becomes plain text, definitions stay as they are written (they would also
change what was drawn long before them), and HTML is text.
"""

from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.token import Token


_DEEPEST: Final = 30
LINE_MOST: Final = 10_000
_INLINE_MOST: Final = 32 * 1024


def split_long(text: str) -> str:
    """`text` with a line end after each 10,000 characters of a line: what is longer takes seconds to lay out,
    and nobody reads it."""
    if len(text) <= LINE_MOST:
        return text
    lines = text.split("\n")
    if max(map(len, lines)) <= LINE_MOST:
        return text
    return "\n".join(
        line[at : at + LINE_MOST] for line in lines for at in range(0, max(1, len(line)), LINE_MOST)
    )


def blocks(text: str) -> "list[Token]":
    """The block tokens of an inert text; contents are not parsed yet (see `inline`)."""
    parser = _parser()
    tokens: list[Token] = []
    parser.block.parse(text, parser, {}, tokens)
    return tokens


def inline(content: str) -> "list[Token] | None":
    """The tokens inside a paragraph, or None where it is too long to be anything but plain text."""
    if len(content) > _INLINE_MOST:
        return None
    parser = _parser()
    tokens: list[Token] = []
    parser.inline.parse(content, parser, {}, tokens)
    return tokens


def load() -> None:
    """Import now what the first text to draw would import, beside the engine that writes it: 30 ms and more of
    one of its cores."""
    import pygments.lexers  # type: ignore[import-untyped]  # noqa: F401

    _parser()


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt  # 25 ms, after the first frame where nothing was said yet

    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": _DEEPEST * 4})
    parser.enable(["table", "strikethrough"])
    parser.disable(["reference", "html_block", "html_inline"])
    parser.block.ruler.before("table", "deep", _deep)
    return parser


def _deep(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """A block rule that takes whatever is nested too deep as one plain text."""
    if state.level < _DEEPEST:
        return False
    if not silent:
        token = state.push("plain", "", 0)
        token.content = state.getLines(start, end, 0, False)
        token.map = [start, end]
        state.line = end
    return True
