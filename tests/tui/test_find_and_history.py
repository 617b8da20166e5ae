"""Search results are shown: in the conversation, and among all conversations."""

import time
from pathlib import Path

from textual.pilot import Pilot
from textual.widgets import OptionList

from localchat.history.store import History
from localchat.session.blocks import AnswerBlock
from localchat.tui.screens.history import HistoryScreen
from tests.support.tui_stage import Stage, app_of, play, say, until


def test_every_mark_is_reached_in_both_directions(tmp_path: Path) -> None:
    hay = ["hay"] * 9

    async def what(pilot: Pilot[int]) -> None:
        view = app_of(pilot).chat.transcript
        await say(pilot, "hi")
        first = AnswerBlock("a", "\n\n".join([*hay, "first needle", *hay]))
        view.show((first, AnswerBlock("b", "second needle\n\nhay\n\nthird needle")))
        await until(pilot, lambda: view.scroll_y > 0)
        end = view.scroll_y
        assert view.search("needle") == 3
        reached = []
        for delta in (0, 1, 1, 1, -1, -1):
            assert view.show_match(delta)
            assert view._text_search.current is not None
            reached.append(view._block_layout.row(view._text_search.current).text.split()[0])
            row = (
                view._block_layout.top(view._text_search.current.block)
                + view._text_search.current.row
            )
            assert view.scroll_y <= row < view.scroll_y + view.size.height, "it is seen"
        assert reached == ["second", "third", "first", "second", "first", "third"]
        assert view.search("first") == 1
        assert view.show_match(0)
        assert view.scroll_y < end
        assert view.search("nowhere") == 0
        assert not view.show_match(0)

    play(Stage(tmp_path), what, 60, 16)


def test_the_find_bar_says_which_match_is_shown(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "hi")
        text = "\n\n".join(f"needle {n}" for n in range(5))
        app.chat.transcript.show((AnswerBlock("a", text),))
        await pilot.press("ctrl+f", *"needle")
        found = app.chat.query_one("#found")
        assert "1 of 5" in str(found.render())
        await pilot.press("enter", "enter")
        assert "3 of 5" in str(found.render())
        await pilot.press("up")
        assert "2 of 5" in str(found.render())
        await pilot.press("x")
        assert "nothing found" in str(found.render())

    play(Stage(tmp_path), what)


def test_the_list_of_conversations_says_what_was_done_and_what_was_not_found(
    tmp_path: Path,
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        for words in ("one", "two"):
            await say(pilot, words)
            app.chat.run_command("/new")
            await until(pilot, lambda: not app.session.conversation.nodes)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, HistoryScreen))
        about, entries = app.screen.query_one("#about"), app.screen.query_one(OptionList)
        await pilot.press("t", "z")
        await pilot.pause()
        assert [str(option.prompt) for option in entries.options] == ["nothing found for tz"]
        await pilot.press("backspace", "backspace", "delete")
        await pilot.pause()
        assert str(about.render()).startswith("Deleted ")

    play(Stage(tmp_path), what)


def test_what_another_program_deleted_is_told_and_leaves_the_list(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        for words in ("one", "two"):
            await say(pilot, words)
            app.chat.run_command("/new")
            await until(pilot, lambda: not app.session.conversation.nodes)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, HistoryScreen))
        screen = app.screen
        assert isinstance(screen, HistoryScreen)
        about = screen.query_one("#about")
        await until(pilot, lambda: screen.marked)
        with History.open(tmp_path / "history.sqlite3") as other:
            assert screen.marked is not None
            other.delete(screen.marked)
            await pilot.press("delete")
            assert "there is no conversation" in str(about.render())
            await pilot.press("delete")
            assert str(about.render()).startswith("Deleted one")
            assert not other.list()
            other.purge(time.time() + 1)
        await pilot.press("ctrl+z")
        assert str(about.render()) == "one cannot be restored: it was deleted for good"

    play(Stage(tmp_path), what)
