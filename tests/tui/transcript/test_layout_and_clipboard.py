"""The parts under the transcript: heights, redraws, clipboard, colours."""

import base64
import subprocess
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.theme import BUILTIN_THEMES

from localchat.session.blocks import AnswerBlock
from localchat.tui import clipboard
from localchat.tui.transcript.layout import BlockHeights, BlockLayout
from localchat.tui.transcript.markdown import Look, Piece, Row
from localchat.tui.transcript.strips import Palette, StripRenderer, contrast

_CHANGES = st.lists(
    st.tuples(st.sampled_from(["set", "append", "remove"]), st.integers(0, 20), st.integers(0, 9)),
    max_size=30,
)


@given(_CHANGES)
def test_tops_are_sums_of_the_heights_before(changes: list[tuple[str, int, int]]) -> None:
    plain: list[int] = []
    heights = BlockHeights()
    for verb, index, height in changes:
        if verb == "append":
            plain.append(height)
            heights.append(height)
        elif verb == "set" and index < len(plain):
            plain[index] = height
            heights.set(index, height)
        elif verb == "remove" and index < len(plain):
            del plain[index]
            heights.remove(index)
        assert [heights.top(at) for at in range(len(plain) + 1)] == [
            sum(plain[:at]) for at in range(len(plain) + 1)
        ]
        assert heights.total == sum(plain)


def test_a_row_belongs_to_the_block_around_it() -> None:
    heights = BlockHeights([3, 1, 4])
    assert [heights.index_at(row) for row in range(-1, 9)] == [0, 0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert BlockHeights().index_at(0) == -1


class Terminal:
    """Rows as a terminal shows them, which keeps those that are not drawn."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.rows: list[Row] = []

    def draw(self, first: int) -> None:
        """Draw the rows from `first` on, as they are now."""
        drawn = [row for _, row in self.layout.visible_rows(first, 1000)]
        self.rows = self.rows[:first] + drawn


def streamed(pieces: list[tuple[str, str]]) -> Terminal:
    """Stream an answer. What a redraw asks for is drawn between the two pieces before the next one."""
    layout = BlockLayout()
    layout.resize(24)
    layout.put(AnswerBlock("answer", "wwwwwwwwww `localchat fit"))
    terminal = Terminal(layout)
    first = layout.redraw(0)
    for early, late in pieces:
        layout.append("answer", early)
        terminal.draw(first)
        layout.append("answer", late)
        first = layout.redraw(0)
    terminal.draw(first)
    return terminal


def test_a_row_that_changed_and_changed_back_is_drawn_again() -> None:
    # A backtick closes the code, one more reopens it, and the last one closes it. Meanwhile a word moves to the
    # next row and back, and both rows are drawn between the redraws.
    terminal = streamed([("", "`"), ("`", " x`")])
    assert [row_text(row) for row in terminal.rows] == ["", "wwwwwwwwww localchat", "fit`` x"]


@settings(max_examples=300)
@given(st.data())
def test_the_terminal_shows_the_whole_answer_whenever_rows_are_drawn(data: st.DataObject) -> None:
    words = st.sampled_from(["", "`", "``", " x", " x`", "*", "**", "localchat ", "\n\n"])
    terminal = streamed(data.draw(st.lists(st.tuples(words, words), max_size=8)))
    expected = [row for _, row in terminal.layout.visible_rows(0, 1000)]
    assert terminal.rows[: len(expected)] == expected


def row_text(row: Row) -> str:
    return "".join(piece.text for piece in row.pieces).strip()


def test_the_clipboard_is_told_by_osc_52() -> None:
    said: list[str] = []
    clipboard.send("naïve \x1b", said.append, {})
    start, end = "\x1b]52;c;", "\x1b\\"
    assert said[0].startswith(start) and said[0].endswith(end)
    assert base64.b64decode(said[0][len(start) : -len(end)]).decode() == "naïve \x1b"


def test_inside_tmux_its_buffer_is_used_and_osc_52_only_where_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, bytes]] = []

    def run(command: Any, *, input: bytes, **_: object) -> Any:  # noqa: A002
        asked.append((command, input))
        return subprocess.CompletedProcess(command, len(asked) - 1, b"")

    monkeypatch.setattr(subprocess, "run", run)
    said: list[str] = []
    clipboard.send("one", said.append, {"TMUX": "/tmp/x"})
    assert asked == [(("tmux", "load-buffer", "-w", "-"), b"one")] and said == []
    clipboard.send("two", said.append, {"TMUX": "/tmp/x"})
    assert said == [clipboard.osc_52("two")]


@pytest.mark.parametrize("name", sorted(BUILTIN_THEMES))
def test_every_theme_gives_readable_colours(name: str) -> None:
    palette = Palette(BUILTIN_THEMES[name].to_color_system().generate())
    text = palette.style(Look())
    for tint in ("code", "link", "code.string", "code.function", "warning", "error", "muted"):
        style = palette.style(Look(tint))
        if palette.ansi:
            assert style.bgcolor is None
            continue
        assert style.color is not None and style.bgcolor is not None and text.color is not None
        front, back = style.color.get_truecolor(), style.bgcolor.get_truecolor()
        most = contrast(text.color.get_truecolor(), back)
        assert contrast(front, back) >= min(4.3, most * 0.8), tint


@given(st.text(st.sampled_from("ab日👩\u200d🚀é "), max_size=40), st.integers(4, 30))
def test_a_strip_has_exactly_its_width(text: str, width: int) -> None:
    painter = StripRenderer(
        Palette({"background": "#101010", "foreground": "#eeeeee"}), width, width - 2
    )
    assume(cell_len(text) + 2 <= width)  # rows are wrapped before
    row = Row((Piece("▌ ", Look("user.bar")), Piece(text, Look())), 1, None, "user")
    for strip in (
        painter.strip(row),
        painter.overlaid_strip(row, [(1, 4, painter.palette.selection())]),
    ):
        assert strip.cell_length == sum(cell_len(part.text) for part in strip) == width
