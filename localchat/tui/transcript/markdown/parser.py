"""A markdown-it parser that drops no text.

The presets silently drop blocks that are nested deeper than `maxNesting`, and all definitions of reference
links. This parser turns deep blocks into plain text, shows definitions, which would also change rows far
above them, and treats HTML as text.
"""

from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token


_MAX_DEPTH: Final = 30
MAX_LINE: Final = 10_000
_MAX_INLINE: Final = 32 * 1024
_MAX_FORMULA: Final = 2_000
_MAX_FORMULA_LINES: Final = 60
_CLOSINGS: Final = {"\\(": "\\)", "\\[": "\\]", "$$": "$$", "$": "$"}
"""Closing delimiter of a formula by its opening one."""


def split_long(text: str) -> str:
    """Break lines after 10,000 characters, because longer lines take seconds to lay out."""
    if len(text) <= MAX_LINE:
        return text
    lines = text.split("\n")
    if max(map(len, lines)) <= MAX_LINE:
        return text
    return "\n".join(
        line[start : start + MAX_LINE]
        for line in lines
        for start in range(0, max(1, len(line)), MAX_LINE)
    )


def blocks(text: str) -> "list[Token]":
    """Return the block tokens of a sanitized text. `inline` parses their contents."""
    parser = _parser()
    tokens: list[Token] = []
    parser.block.parse(text, parser, {}, tokens)
    return tokens


def inline(content: str) -> "list[Token] | None":
    """Return the inline tokens of a paragraph. None if it is too long to parse."""
    if len(content) > _MAX_INLINE:
        return None
    parser = _parser()
    tokens: list[Token] = []
    parser.inline.parse(content, parser, {}, tokens)
    return tokens


def load() -> None:
    """Import what the first answer needs. It takes 30 ms or more of a core that the engine needs then."""
    import pygments.lexers  # type: ignore[import-untyped]  # noqa: F401

    _parser()


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt  # 25 ms, so not before the first frame

    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": _MAX_DEPTH * 4})
    parser.enable(["table", "strikethrough"])
    parser.disable(["reference", "html_block", "html_inline"])
    parser.block.ruler.before("table", "deep", _plain_if_too_deep)
    parser.block.ruler.before(
        "table", "formula", _formula_block, {"alt": ["paragraph", "blockquote", "list"]}
    )
    parser.inline.ruler.before("escape", "formula", _formula)
    return parser


def _formula(state: "StateInline", silent: bool) -> bool:
    r"""Inline rule: a LaTeX formula in `\( \)`, `\[ \]`, `$$` or `$`, whose backslashes are no escapes."""
    opening = next((sign for sign in _CLOSINGS if state.src.startswith(sign, state.pos)), None)
    if opening is None:
        return False
    start = state.pos + len(opening)
    closing = _CLOSINGS[opening]
    end = state.src.find(closing, start, min(state.posMax, start + _MAX_FORMULA))
    if end < 0 or not _is_formula(
        opening, state.src[start:end], state.src[end + len(closing) :][:1]
    ):
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content = state.src[start:end]
    state.pos = end + len(closing)
    return True


def _is_formula(opening: str, inside: str, after: str) -> bool:
    """Return True for a formula, not an escaped bracket or an amount of money."""
    text = inside.strip()
    if opening == "$":  # the rule of pandoc
        return bool(text) and text == inside and "\n\n" not in text and not after.isdigit()
    return bool(text) and (len(text) <= 3 or any(sign in text for sign in "\\^_=+-*/<>|0123456789"))


def _formula_block(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    r"""Block rule: a formula from `$$` or `\[` to its end, also over blank lines and what looks like a list."""
    first = state.bMarks[start] + state.tShift[start]
    opening = state.src[first : first + 2]
    if opening not in ("$$", "\\[") or state.is_code_block(start):
        return False
    line = start
    searched = first + 2
    while (close := state.src.find(_CLOSINGS[opening], searched, state.eMarks[line])) < 0:
        line += 1
        if line >= end or line - start > _MAX_FORMULA_LINES:
            return False
        searched = state.bMarks[line]
    inside = state.src[first + 2 : close]
    if state.src[close + 2 : state.eMarks[line]].strip() or not _is_formula(opening, inside, ""):
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content = inside
        token.map = [start, line + 1]
        state.line = line + 1
    return True


def _plain_if_too_deep(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """Block rule: text that is nested too deep becomes one plain token."""
    if state.level < _MAX_DEPTH:
        return False
    if not silent:
        token = state.push("plain", "", 0)
        token.content = state.getLines(start, end, 0, False)
        token.map = [start, end]
        state.line = end
    return True
