"""Search results are shown: in the conversation, and among all conversations."""

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList

from localchat.chat.conversation import Conversation, Inclusion
from localchat.engine.events import Text
from localchat.engine.request import GenerateRequest, Message
from localchat.history.store import History
from localchat.tui.screens.history import HistoryScreen
from tests.support.conversations import kept
from tests.support.histories import purge_deleted
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tui_stage import HOLD, Stage, app_of, play, say, sent, until, visible

FILLER = "\n\n".join(f"Line {number} of a text." for number in range(60))
HIDDEN = f"{FILLER}\n\nHere is a **zebra**.\n\n{FILLER}"


def held_at_two(request: GenerateRequest) -> ScriptedAnswer:
    """Answer the question "two" without an end."""
    if sent(request)[-1][1] == "two":
        return ScriptedAnswer(events=(Text(0, "more"), HOLD))
    return ScriptedAnswer((HIDDEN,))


async def open_match(pilot: Pilot[int], text: str) -> None:
    """Search all conversations for a text, and open the first match."""
    app = app_of(pilot)
    await pilot.press("ctrl+r")
    await until(pilot, lambda: isinstance(app.screen, HistoryScreen))
    await pilot.press(*text)
    entries = app.screen.query_one(OptionList)
    await until(pilot, lambda: text in str(entries.options[0].prompt).lower())
    await pilot.press("enter")
    await until(pilot, lambda: app.screen is app.chat)


@pytest.mark.parametrize(
    "texts",
    [
        ("one", HIDDEN, "two", FILLER),
        (HIDDEN.replace("*", ""), "answer", "two", FILLER),
        ("one", "answer", "zebras?", "answer"),
    ],
    ids=["answer", "question", "end"],
)
def test_a_match_in_another_conversation_is_on_the_screen_once_opened(
    tmp_path: Path, texts: tuple[str, ...]
) -> None:
    with History.open(tmp_path / "history.sqlite3") as history:
        kept(history, *texts)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await open_match(pilot, "zebra")
        await until(pilot, lambda: app.session.conversation.nodes)
        await until(pilot, lambda: "zebra" in visible(app))
        block = app.chat.transcript.block(app.chat.transcript.focused_id or "")
        assert block is not None and "zebra" in block.text  # type: ignore[union-attr]

    play(Stage(tmp_path), what)


def test_a_match_in_a_folded_part_is_unfolded(tmp_path: Path) -> None:
    conversation = Conversation()
    folded = Inclusion("a.txt", 5, 5 + len(HIDDEN))
    question = conversation.add(
        Message("user", f"look {HIDDEN}"), parent=None, inclusions=(folded,)
    )
    conversation.add(Message("assistant", FILLER), parent=question.id)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        for node in conversation.nodes.values():
            app.recorder.changed(node)
        app.recorder.flush()
        await open_match(pilot, "zebra")
        await until(pilot, lambda: "zebra" in visible(app))

    play(Stage(tmp_path, conversation=conversation), what)


def test_a_search_in_the_open_conversation_goes_to_the_match_and_its_answer_continues(
    tmp_path: Path,
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "one")
        app.chat.composer.write("two")
        await pilot.press("enter")
        await until(pilot, lambda: "more" in visible(app))
        conversation = app.session.conversation
        await open_match(pilot, "zebra")
        await until(pilot, lambda: "zebra" in visible(app))
        assert app.session.busy
        assert app.session.conversation is conversation

    play(Stage(tmp_path, script=held_at_two), what)


def test_a_search_does_not_leave_the_branch_of_a_running_answer(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "zebra")
        app.chat.run_command("/undo")
        await pilot.press("ctrl+u")
        app.chat.composer.write("two")
        await pilot.press("enter")
        await until(pilot, lambda: "more" in visible(app))
        await open_match(pilot, "zebra")
        assert app.session.busy
        assert app.session.conversation.path()[0].message.content == "two"
        assert "answer" in str(app.chat.query_one("#banner").render())

    play(Stage(tmp_path, script=held_at_two), what)


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


def test_a_match_in_another_branch_is_opened_in_that_branch(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "zebra")
        app.chat.run_command("/undo")
        await until(pilot, lambda: not app.session.conversation.path())
        await pilot.press("ctrl+u")
        await say(pilot, "two")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, HistoryScreen))
        await pilot.press(*"zebra")
        entries = app.screen.query_one(OptionList)
        await until(pilot, lambda: "zebra" in str(entries.options[0].prompt))
        await pilot.press("enter")
        await until(pilot, lambda: app.session.conversation.path()[0].message.content == "zebra")

    play(Stage(tmp_path), what)


def test_a_new_title_of_the_open_conversation_is_shown_at_once(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "one")
        heading = app.chat.query_one("#title")
        assert str(heading.render()) == "one"
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, HistoryScreen))
        screen = app.screen
        assert isinstance(screen, HistoryScreen)
        await until(pilot, lambda: screen.marked)
        await pilot.press("ctrl+s", "ctrl+u", "t", "w", "o", "enter")
        await until(pilot, lambda: str(heading.render()) == "two")
        await pilot.press("escape")
        await say(pilot, "three")
        assert str(heading.render()) == "two"
        app.session.recorder.flush()
        with History.open(tmp_path / "history.sqlite3") as other:
            assert [summary.title for summary in other.list()] == ["two"]

    play(Stage(tmp_path), what)


@pytest.mark.parametrize("restored", [False, True])
def test_a_new_conversation_replaces_the_open_one_after_its_deletion(
    tmp_path: Path, restored: bool
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "one")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, HistoryScreen))
        screen = app.screen
        assert isinstance(screen, HistoryScreen)
        await until(pilot, lambda: screen.marked)
        await pilot.press("delete", *["ctrl+z"] * restored, "escape")
        await until(pilot, lambda: app.screen is app.chat)
        await until(pilot, lambda: restored or not app.session.conversation.nodes)
        await pilot.pause()
        assert bool(app.session.conversation.nodes) is restored
        app.session.recorder.flush()
        with History.open(tmp_path / "history.sqlite3") as other:
            assert len(other.list()) == restored

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
            purge_deleted(other)
        await pilot.press("ctrl+z")
        assert str(about.render()) == "one cannot be restored: it was deleted for good"

    play(Stage(tmp_path), what)
