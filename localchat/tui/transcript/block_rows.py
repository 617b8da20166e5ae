"""Rows of each kind of block: gutter, text, and muted lines around it."""

import json
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from rich.cells import cell_len

from localchat.chat.conversation import ToolRun
from localchat.sanitize import sanitize_line
from localchat.session.blocks import (
    AnswerBlock,
    Block,
    Branch,
    Fold,
    NoticeBlock,
    ProgressBlock,
    ReasoningBlock,
    SummaryBlock,
    ToolCallBlock,
    UserBlock,
)
from localchat.tui.attachments import clean
from localchat.tui.column import GUTTER, MAX_TEXT_CELLS
from localchat.tui.pictures.painter import PicturePainter, attachment_title
from localchat.tui.transcript.markdown import Look, Piece, Row, layout
from localchat.tui.transcript.markdown.code import Highlighting, highlight
from localchat.tui.transcript.markdown.layout import code_rows, plain_rows
from localchat.tui.transcript.markdown.parser import split_long
from localchat.tui.transcript.markdown.rows import EMPTY, MUTED, PLAIN
from localchat.tui.transcript.markdown.wrap import wrap
from localchat.units import counted

_INDENT: Final = Piece("  ", PLAIN)
_BLANK: Final = Row((_INDENT,), 1)
_SIGNS: Final = {"info": "●", "warning": "▲", "error": "✕"}
_BAR_CELLS: Final = 40
_PICTURE_ROWS: Final = 12
"""Estimated rows of a picture with its caption."""
_DIFF = re.compile(r"^--- .+\n\+\+\+ .+\n@@ ", re.MULTILINE)
"""Start of a difference between two versions of a file."""
_PREVIEW_ROWS: Final = 3
"""Rows of arguments that a folded tool call shows."""


class RowHit(NamedTuple):
    """Effect of a click on a row: accept an offer, or without an action toggle the block."""

    action: str = ""


class BlockRows(NamedTuple):
    """Rows of a block."""

    rows: list[Row]
    hits: dict[int, RowHit]
    """Clickable rows, by index."""


def text_width(width: int) -> int:
    """Width of text in a transcript of this width, in cells."""
    return max(4, min(width - 2 * GUTTER, MAX_TEXT_CELLS))


def block_rows(
    block: Block,
    width: int,
    *,
    is_open: bool,
    rows: list[Row] | None = None,
    unfinished: list[Highlighting] | None = None,
    painter: PicturePainter | None = None,
) -> BlockRows:
    """Lay out a block.

    `rows` is the indented Markdown of an answer, if it is already laid out. `unfinished` collects the
    incomplete highlighting of its code. `painter` draws the pictures of a question.
    """
    match block:
        case UserBlock():
            return _user(block, width, is_open, painter or PicturePainter())
        case AnswerBlock():
            return _answer(block, width, rows, unfinished)
        case ReasoningBlock():
            return _reasoning(block, width, is_open)
        case ToolCallBlock():
            return _tool_call(block, width, is_open)
        case SummaryBlock():
            return _summary(block, width, is_open)
        case NoticeBlock():
            return _notice(block, width)
        case ProgressBlock():
            return _progress(block, width)


def estimate_height(block: Block, width: int, *, is_open: bool) -> int:
    """Estimate the height of a block in rows, without laying it out."""
    room = text_width(width)
    folded = isinstance(block, ReasoningBlock | SummaryBlock) and not is_open
    if folded:
        return 2
    if isinstance(block, ToolCallBlock):
        text = block.arguments
    else:
        text = block.text
    lines = text.count("\n") + 1
    if isinstance(block, UserBlock):
        lines += len(block.attachments) * _PICTURE_ROWS
    return 2 + max(lines, lines // 2 + len(text) // room)


def _fold_sign(is_open: bool) -> str:
    if is_open:
        return "▾"
    return "▸"


def _user(block: UserBlock, width: int, is_open: bool, painter: PicturePainter) -> BlockRows:
    bar = Piece("▌ ", Look("user.bar"))
    hits: dict[int, RowHit] = {}
    rows = [EMPTY]
    blank = Row((bar,), 1, None, "user")
    for line in _folded_lines(block, is_open):
        if not line:
            # A picture without words needs no empty line.
            if block.text or not block.attachments:
                rows.append(blank)
            continue
        for row in wrap(line, text_width(width) + GUTTER, (bar,), ground="user"):
            if any(piece.look.tint == "chip" for piece in row.pieces):
                hits[len(rows)] = RowHit()
            rows.append(row)
    for attachment in block.attachments:
        drawn = painter.draw(attachment, text_width(width))
        rows += [Row((bar,), 1, None, "user", picture=row) for row in drawn.rows]
        rows += [
            row._replace(lead=len(row.pieces))
            for row in wrap(
                [Piece(drawn.caption, MUTED)], text_width(width) + GUTTER, (bar,), ground="user"
            )
        ]
    if mark := _branch(block.branch):
        rows.append(Row((bar, Piece(mark, MUTED)), 2, None, "user"))
    return BlockRows(rows, hits)


def _folded_lines(block: UserBlock, is_open: bool) -> Iterator[list[Piece]]:
    line: list[Piece] = []
    for text, fold in _parts(block):
        if fold is not None and fold.start == fold.end:
            line.append(Piece(f" {fold.label} ", Look("chip")))
            continue
        if fold is not None:
            if line and is_open:
                yield line
                line = []
            sign = _fold_sign(is_open)
            line.append(Piece(f" {sign} {sanitize_line(fold.label)} ", Look("chip")))
            if not is_open:
                continue
            yield line
            line = []
        first, *later = split_long(clean(text)).split("\n")
        line += _words(first)
        for part in later:
            yield line
            line = _words(part)
    yield line


def _words(text: str) -> list[Piece]:
    if text:
        return [Piece(sanitize_line(text.replace("\t", "    ")), PLAIN)]
    return []


def _parts(block: UserBlock) -> Iterator[tuple[str, Fold | None]]:
    """Yield the parts of the text, each with its fold if it is folded."""
    position = 0
    # A picture inside the text has a chip at its place. The picture itself is below the text.
    chips = [
        Fold(attachment_title(item), item.position, item.position)
        for item in block.attachments
        if block.text[: item.position].strip() and block.text[item.position :].strip()
    ]
    for fold in sorted((*block.folds, *chips), key=lambda fold: fold.start):
        if position <= fold.start <= fold.end <= len(block.text):
            if fold.start > position:
                yield block.text[position : fold.start], None
            yield block.text[fold.start : fold.end], fold
            position = fold.end
    if position < len(block.text) or position == 0:
        yield block.text[position:], None


def _answer(
    block: AnswerBlock,
    width: int,
    body: list[Row] | None,
    unfinished: list[Highlighting] | None,
) -> BlockRows:
    if body is None:
        body = [indent_row(row) for row in layout(clean(block.text), text_width(width), unfinished)]
    rows = [EMPTY, *body]
    quiet = " · ".join(filter(None, (_branch(block.branch), sanitize_line(block.footer))))
    if body and (quiet or block.ended):
        rows.append(EMPTY)
    if block.ended:
        rows += _decoration(f"■ {sanitize_line(block.ended)}", width, Look("warning"))
    if quiet:
        rows += _decoration(quiet, width)
    return BlockRows(rows, {})


def indent_row(row: Row) -> Row:
    """Return a row of text after the gutter."""
    if row == EMPTY:
        return _BLANK
    return Row((_INDENT, *row.pieces), row.lead + 1, row.joint, row.ground, row.bare + 1)


def _decoration(text: str, width: int, look: Look = MUTED) -> Iterator[Row]:
    """Yield rows of text by localchat, which are never part of copied text."""
    for row in wrap([Piece(text, look)], text_width(width) + GUTTER, (_INDENT,)):
        yield row._replace(lead=len(row.pieces))


def _branch(branch: Branch) -> str:
    if branch.total > 1:
        return f"‹ {branch.number}/{branch.total} ›"
    return ""


def _reasoning(block: ReasoningBlock, width: int, is_open: bool) -> BlockRows:
    words = len(block.text.split())
    if block.seconds is None:
        state = "thinking"
    else:
        state = f"thought for {block.seconds:,.1f} s"
    title = f"{state} · {counted(words, 'word')}"
    return _folded(title, block.text, width, is_open)


def _folded(title: str, text: str, width: int, is_open: bool) -> BlockRows:
    """Lay out a title that a click opens, and the text below it."""
    look = Look("muted", italic=True)
    rows = [EMPTY, *_decoration(f"{_fold_sign(is_open)} {title}", width, look)]
    hits = {number: RowHit() for number in range(1, len(rows))}
    if is_open:
        bar = (_INDENT, Piece("│ ", Look("rule")))
        rows += plain_rows(clean(text).strip("\n"), text_width(width) + GUTTER, bar, look=look)
    return BlockRows(rows, hits)


def _tool_call(block: ToolCallBlock, width: int, is_open: bool) -> BlockRows:
    if block.run is not None:
        return _tool_run(block, block.run, width, is_open)
    title = [
        Piece("◆ ", Look("tool")),
        Piece(sanitize_line(block.name) or "a tool", Look("tool", bold=True)),
        Piece("  asked for, not run", MUTED),
    ]
    rows = [EMPTY, *wrap(title, text_width(width) + GUTTER, (_INDENT,))]
    lines = highlight(split_long(_pretty(block.arguments)), "json")
    lead = (_INDENT, Piece("  ", PLAIN))
    body = list(code_rows(lines, "", text_width(width) + GUTTER, lead))
    hits = {}
    if len(body) > _PREVIEW_ROWS + 1:
        hits = {number: RowHit() for number in range(1, len(rows))}
        if is_open:
            more = f"▾ {len(body)} lines"
        else:
            more = f"▸ {len(body) - _PREVIEW_ROWS} more lines"
            body = body[:_PREVIEW_ROWS]
        body += [
            row._replace(pieces=(_INDENT, *row.pieces), lead=row.lead + 1)
            for row in _decoration(more, width - GUTTER)
        ]
        hits[len(rows) + len(body) - 1] = RowHit()
    return BlockRows(rows + body, hits)


def _tool_run(block: ToolCallBlock, run: ToolRun, width: int, is_open: bool) -> BlockRows:
    """Lay out a call that localchat runs: one line, and opened also its arguments and its result."""
    name = sanitize_line(block.name) or "a tool"
    title = [
        Piece(f"{_fold_sign(is_open)} ", Look("tool")),
        Piece(name, Look("tool", bold=True)),
        Piece(f"  {sanitize_line(run.title)}" if run.title else "", PLAIN),
        Piece(f"  {_run_state(run)}", Look("warning") if run.state == "failed" else MUTED),
    ]
    rows = [EMPTY, *wrap(title, text_width(width) + GUTTER, (_INDENT,))]
    hits = {number: RowHit() for number in range(1, len(rows))}
    if not is_open:
        if run.state in ("failed", "refused"):
            reason = block.result.removeprefix("Error: ").partition("\n")[0]
            rows += _decoration(f"  {sanitize_line(reason)}", width)
        return BlockRows(rows, hits)
    bar = (_INDENT, Piece("│ ", Look("rule")))
    rows += code_rows(
        highlight(split_long(_pretty(block.arguments)), "json"), "", text_width(width) + GUTTER, bar
    )
    if block.result:
        rows += _decoration("  result", width)
        text = clean(block.result).strip("\n")
        if _DIFF.search(text):
            lines = highlight(split_long(text), "diff")
            rows += code_rows(lines, "", text_width(width) + GUTTER, bar)
        else:
            rows += plain_rows(text, text_width(width) + GUTTER, bar)
    return BlockRows(rows, hits)


def _run_state(run: ToolRun) -> str:
    """Return the state of a call, and of one that ended its time and the size of its result."""
    match run.state:
        case "asking":
            return "waits for your consent"
        case "running":
            return "running · Esc stops it"
        case "refused":
            return "not run"
        case "failed":
            return "failed"
    return f"{run.seconds:,.1f} s · {counted(run.characters, 'character')}"


def _pretty(arguments: str) -> str:
    """Return JSON with one value per line. Text that is not (yet) JSON is unchanged."""
    if len(arguments) > 64 * 1024:
        return clean(arguments)
    try:
        return clean(json.dumps(json.loads(arguments), indent=2, ensure_ascii=False))
    except (ValueError, RecursionError):
        return clean(arguments)


def _summary(block: SummaryBlock, width: int, is_open: bool) -> BlockRows:
    title = f"{_fold_sign(is_open)} summary of {counted(block.messages, 'message')}"
    if block.tokens:
        title += f", {block.tokens:,} tokens"
    if is_open:
        title += ": this is what the model knows of them"
    rows = [EMPTY, *_decoration(title, width, Look("bullet", italic=True))]
    hits = {number: RowHit() for number in range(1, len(rows))}
    if is_open:
        bar = Piece("│ ", Look("rule"))
        for row in layout(clean(block.text), text_width(width) - cell_len(bar.text)):
            rows.append(
                row._replace(
                    pieces=(_INDENT, bar, *row.pieces), lead=row.lead + 2, bare=row.bare + 2
                )
            )
    return BlockRows(rows, hits)


def _progress(block: ProgressBlock, width: int) -> BlockRows:
    rows = [EMPTY, *_decoration(clean(block.text), width)]
    if block.share is not None:
        cells = min(_BAR_CELLS, text_width(width))
        done = min(cells, round(block.share * cells))
        bar = (
            _INDENT,
            Piece("━" * done, Look("bullet")),
            Piece("╌" * (cells - done), Look("rule")),
        )
        rows.append(Row(bar, len(bar)))
    return BlockRows(rows, {})


def _notice(block: NoticeBlock, width: int) -> BlockRows:
    sign = Piece(f"{_SIGNS[block.kind]} ", Look(block.kind))
    blank = Piece("  ", PLAIN)
    rows = [EMPTY]
    first: tuple[Piece, ...] = (_INDENT, sign)
    rows += plain_rows(clean(block.text), text_width(width) + GUTTER, first, (_INDENT, blank))
    hits: dict[int, RowHit] = {}
    for number, offer in enumerate(block.offers, block.first):
        label = [Piece(sanitize_line(offer.label), PLAIN)]
        key = Piece(f"{offer.key or number}  ", Look("number", bold=True))
        below = Piece(" " * cell_len(key.text), PLAIN)
        for row in wrap(
            label, text_width(width) + GUTTER, (_INDENT, blank, key), (_INDENT, blank, below)
        ):
            hits[len(rows)] = RowHit(offer.action)
            rows.append(row)
    return BlockRows(rows, hits)
