"""The transcript in an app: following, folding, offers, selection, resizing, streaming."""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
from rich.cells import cell_len
from textual.app import App, ComposeResult
from textual.selection import Selection
from textual.widgets import Input

from localchat.session.blocks import (
    AnswerBlock,
    Block,
    Branch,
    Fold,
    NoticeBlock,
    Offer,
    ReasoningBlock,
    SummaryBlock,
    ToolCallBlock,
    UserBlock,
)
from localchat.tui.transcript.widget import Transcript
from tests.support.cli_program import HOSTILE


class Stage(App[None]):
    """A transcript over an input line, and what the transcript said."""

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        super().__init__()
        self.first = tuple(blocks)
        self.said: list[object] = []

    def compose(self) -> ComposeResult:
        yield Transcript()
        yield Input()

    def on_mount(self) -> None:
        self.transcript.show(self.first)

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    def on_transcript_offer_taken(self, message: Transcript.OfferTaken) -> None:
        self.said.append(message.action)

    def open_url(self, url: str, *, new_tab: bool = True) -> None:
        self.said.append(url)

    def lines(self) -> list[str]:
        """The rows of the transcript on the screen."""
        height = self.transcript.size.height
        strips = [self.transcript.render_line(y) for y in range(height)]
        width = self.transcript.scrollable_content_region.width
        assert {strip.cell_length for strip in strips} == {width}
        assert {cell_len(strip.text) for strip in strips} == {width}
        return [strip.text.rstrip() for strip in strips]

    def row_of(self, text: str) -> int:
        return next(y for y, line in enumerate(self.lines()) if text in line)


def in_a_loop(test: Callable[..., Coroutine[Any, Any, object]]) -> Callable[..., None]:
    """A test that is a coroutine, run."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


def answers(count: int, words: int = 40) -> list[Block]:
    return [AnswerBlock(f"a{i}", f"answer {i} " + "lorem ipsum " * words) for i in range(count)]


async def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not true():
        assert time.monotonic() < end, "it did not come to be"
        await asyncio.sleep(0.02)


async def _shown(app: Stage, words: str) -> None:
    await _until(lambda: words in "\n".join(app.lines()))


@in_a_loop
async def test_it_begins_at_the_end_and_follows_what_comes() -> None:
    app = Stage(answers(20))
    async with app.run_test(size=(60, 16)) as pilot:
        await pilot.pause()
        transcript = app.transcript
        assert transcript.following and transcript.scroll_y == transcript.max_scroll_y
        transcript.put(AnswerBlock("new", "the newest"))
        await pilot.pause()
        assert "the newest" in "\n".join(app.lines())
        for _ in range(30):
            transcript.append_text("new", "\n\nmore of it")
        transcript.append_text("new", "\n\nthe very end")
        await _shown(app, "the very end")
        transcript.finish("new")
        assert "the very end" in "\n".join(app.lines())


@in_a_loop
async def test_what_comes_while_it_is_hidden_is_there_later_and_nothing_wakes_meanwhile() -> None:
    class Hidden(Stage):
        CSS = "Transcript { display: none; }"

    app = Hidden()
    async with app.run_test(size=(60, 16)) as pilot:
        transcript = app.transcript
        await pilot.pause()
        transcript.put(AnswerBlock("a", "written behind the curtain"))
        transcript.append_text("a", " and more")
        await _until(lambda: transcript.is_idle)  # no timer goes on for what nobody sees
        transcript.display = True
        await pilot.pause()
        await _until(lambda: transcript.is_idle)
        assert "behind the curtain and more" in "\n".join(app.lines())


@in_a_loop
async def test_a_reader_who_scrolled_up_is_left_in_peace() -> None:
    app = Stage(answers(20))
    async with app.run_test(size=(60, 16)) as pilot:
        await pilot.pause()
        transcript = app.transcript
        transcript.scroll_to(y=20, animate=False)
        await pilot.pause()
        assert not transcript.following
        before = app.lines()
        transcript.put(AnswerBlock("new", "the newest"))
        transcript.append_text("new", " and more\n\n" * 40)
        await asyncio.sleep(0.3)
        assert app.lines() == before
        transcript.to_end()
        await pilot.pause()
        assert app.transcript.following
        assert app.lines() != before


@in_a_loop
async def test_correcting_estimates_does_not_move_what_is_read() -> None:
    blocks = [
        AnswerBlock(f"a{i}", f"here {i}\n\n" + "- x\n" * (i % 7) + "word " * 90) for i in range(80)
    ]
    app = Stage(blocks)
    async with app.run_test(size=(60, 16)) as pilot:
        await pilot.pause()
        app.transcript.scroll_to(y=200, animate=False)
        await pilot.pause()
        before = app.lines()
        await _until(lambda: app.transcript.is_idle)
        assert app.lines() == before


@in_a_loop
async def test_scrolling_up_line_by_line_shows_every_line_once() -> None:
    app = Stage(
        [AnswerBlock(f"a{i}", "\n".join(f"line {i}.{j}" for j in range(9))) for i in range(30)]
    )
    async with app.run_test(size=(60, 16)) as pilot:
        await pilot.pause()
        seen = [line for line in app.lines() if line]
        while app.transcript.scroll_y > 0:
            app.transcript.scroll_to(y=app.transcript.scroll_y - 1, animate=False)
            await pilot.pause(0)
            if top := app.lines()[0]:
                seen.insert(0, top)
        assert [line.strip() for line in seen] == [
            f"line {i}.{j}" for i in range(30) for j in range(9)
        ]


@in_a_loop
async def test_a_resize_keeps_the_place() -> None:
    app = Stage(answers(40))
    async with app.run_test(size=(60, 16)) as pilot:
        await pilot.pause()
        app.transcript.scroll_to(y=120, animate=False)
        await pilot.pause()
        named = [line for line in app.lines() if "answer" in line]
        await pilot.resize_terminal(90, 16)
        await pilot.pause()
        assert any(line.split()[1] in named[0] for line in app.lines() if "answer" in line)
        app.transcript.to_end()
        await pilot.resize_terminal(40, 12)
        await pilot.pause()
        assert app.transcript.scroll_y == app.transcript.max_scroll_y
        app.lines()


@in_a_loop
async def test_folds_open_and_close() -> None:
    pasted = "one\n" * 30
    app = Stage(
        [
            UserBlock("u", f"look: {pasted} end", folds=(Fold("paste", 6, 6 + len(pasted)),)),
            ReasoningBlock("r", "first thought\nsecond", 3.21),
            ToolCallBlock("t", "weather", '{"a": 1, "b": 2, "c": 3, "d": 4}'),
            SummaryBlock("s", "short *text*", 14, 6210),
        ]
    )
    async with app.run_test(size=(70, 60)) as pilot:
        await pilot.pause()
        text = "\n".join(app.lines())
        assert "▸ paste" in text and "one" not in text
        assert "thought for 3.2 s · 3 words" in text and "first thought" not in text
        assert "summary of 14 messages, 6,210 tokens" in text and "short" not in text
        assert '"a": 1' in text and '"d": 4' not in text
        for mark in ("paste", "thought for", "weather", "summary of"):
            await pilot.click(Transcript, offset=(4, app.row_of(mark)))
        await pilot.pause()
        text = "\n".join(app.lines())
        assert text.count("one") == 30 and "end" in text
        assert "first thought" in text and "short text" in text and '"d": 4' in text
        app.transcript.toggle("r")
        assert "first thought" not in "\n".join(app.lines())
        app.transcript.open_fold("r")
        app.transcript.open_fold("r")
        assert "first thought" in "\n".join(app.lines())


@in_a_loop
async def test_offers_and_links_are_clicked() -> None:
    app = Stage(
        [
            AnswerBlock("a", "see [here](https://x.org/y) please"),
            NoticeBlock(
                "n", "too long", "warning", (Offer("leave out", "out"), Offer("compact", "sum"))
            ),
        ]
    )
    async with app.run_test(size=(70, 20)) as pilot:
        await pilot.pause()
        await pilot.click(Transcript, offset=(8, app.row_of("see here")))
        await pilot.click(Transcript, offset=(20, app.row_of("see here")))
        await pilot.click(Transcript, offset=(8, app.row_of("compact")))
        await pilot.pause()
        assert app.said == ["https://x.org/y", "sum"], "a click on the text does nothing"
        assert app.transcript.take_offer(1) and not app.transcript.take_offer(3)
        await pilot.pause()
        assert app.said[-1] == "out"


@in_a_loop
async def test_a_selection_copies_the_text_without_its_decoration() -> None:
    item = "an item that is long enough to be wrapped at this narrow width"
    text = f"- {item}\n- two\n\n> quoted\n\n```py\nx = 1\n```\n"
    app = Stage([UserBlock("u", "question"), AnswerBlock("a", text, footer="12 tokens")])
    async with app.run_test(size=(40, 30)) as pilot:
        await pilot.pause()
        app.transcript.screen.selections = {app.transcript: Selection(None, None)}
        await pilot.pause()
        copied = app.transcript.get_selection(Selection(None, None))
        assert copied is not None
        assert [line for line in copied[0].split("\n") if line] == [
            "question",
            *(f"• {item}", "• two", "quoted", "x = 1"),
        ]
        app.lines()


@in_a_loop
async def test_a_drag_selects_and_stays_with_its_text_while_more_comes() -> None:
    app = Stage([AnswerBlock("a", "alpha beta gamma"), AnswerBlock("b", "delta")])
    async with app.run_test(size=(40, 12)) as pilot:
        await pilot.pause()
        row = app.row_of("alpha")
        await pilot.mouse_down(Transcript, offset=(8, row))
        await pilot.hover(Transcript, offset=(11, row))
        await pilot.mouse_up(Transcript, offset=(11, row))
        await pilot.pause()
        assert app.screen.get_selected_text() == "beta"
        app.transcript.append_text("b", "\n\nmore" * 20)
        await asyncio.sleep(0.2)
        assert app.screen.get_selected_text() == "beta"


@in_a_loop
async def test_focus_walks_over_blocks_and_brings_them_into_view() -> None:
    app = Stage(answers(9))
    async with app.run_test(size=(60, 10)) as pilot:
        await pilot.pause()
        assert app.transcript.focus_block(-1) == "a8"
        assert app.transcript.focus_block(-1) == "a7"
        assert "answer 7" in "\n".join(app.lines())
        assert any(line.startswith("▎") for line in app.lines())
        assert app.transcript.focus_block(-99) == "a0"
        assert "answer 0" in "\n".join(app.lines())
        app.transcript.unfocus_block()
        assert not any(line.startswith("▎") for line in app.lines())


@in_a_loop
async def test_blocks_are_replaced_dropped_and_read() -> None:
    app = Stage([AnswerBlock("a", "old"), UserBlock("u", "ask", branch=Branch(2, 3))])
    async with app.run_test(size=(60, 20)) as pilot:
        await pilot.pause()
        assert "‹ 2/3 ›" in "\n".join(app.lines())
        app.transcript.put(AnswerBlock("a", "older and longer", footer="9 tok/s"))
        assert "older and longer" in "\n".join(app.lines()) and "9 tok/s" in "\n".join(app.lines())
        app.transcript.append_text("a", "\n\n```py\nx=1\n```")
        assert app.transcript.code_blocks("a") == ["x=1\n"]
        app.transcript.drop("u")
        assert "ask" not in "\n".join(app.lines())
        assert [block.id for block in app.transcript.blocks] == ["a"]


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light", "ansi-dark", "nord"])
@in_a_loop
async def test_every_theme_and_hostile_text_in_every_block(theme: str) -> None:
    nasty = f"{HOSTILE} [/x] [@click=app.bell]x[/] \u202eabc\u2028 \u200b"
    app = Stage(
        [
            UserBlock("u", nasty, folds=(Fold(nasty, 0, 5),)),
            ReasoningBlock("r", nasty),
            ToolCallBlock("t", nasty, nasty),
            SummaryBlock("s", nasty, 1, 1),
            NoticeBlock("n", nasty, "error", (Offer(nasty, "x"),)),
            AnswerBlock("a", f"{nasty}\n\n```{nasty}\n{nasty}\n```", footer=nasty),
        ]
    )
    async with app.run_test(size=(80, 60)) as pilot:
        app.theme = theme
        for block in ("u", "r", "s", "t"):
            app.transcript.open_fold(block)
        await pilot.pause()
        text = "\n".join(app.lines())
        assert "[/x] [@click=app.bell]x[/]" in text
        assert all(c.isprintable() or c in "\n\u200b" for c in text)


@in_a_loop
async def test_nothing_is_drawn_while_the_terminal_has_not_read_the_last_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    behind = [True]
    monkeypatch.setattr("localchat.tui.transcript.widget.output_is_pending", lambda app: behind[0])
    monkeypatch.setattr("localchat.tui.transcript.widget._SLOW_REDRAW_S", 0.05)
    app = Stage(answers(20))
    async with app.run_test(size=(60, 20)) as pilot:
        await pilot.pause()
        transcript = app.transcript
        transcript.put(AnswerBlock("new", "begun"))
        assert "begun" not in "\n".join(app.lines())
        behind[0] = False
        await _shown(app, "begun")
