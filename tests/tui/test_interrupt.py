"""Ctrl+C and Ctrl+Z, as in other programs of a terminal."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from localchat.engine.events import Text
from localchat.errors import HistoryUnusable
from localchat.history.store import History
from localchat.tui.screens.help import HelpScreen
from localchat.tui.screens.history import HistoryScreen
from tests.support.terminal_program import PROGRAM, Program
from tests.support.tui_scenes import held
from tests.support.tui_stage import Stage, app_of, play, say, told, until


def banner(app: Any) -> str:
    return str(app.chat.query_one("#banner").render())


@pytest.mark.parametrize("back", ["up", "ctrl+underscore"])
def test_ctrl_c_clears_the_draft_and_it_comes_back(tmp_path: Path, back: str) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press(*"half a thought")
        app.chat.composer.editor.insert_paste("line\n" * 300)
        before = app.chat.composer.written
        await pilot.press("ctrl+c")
        assert app.chat.composer.text == ""
        assert "Cleared; Up or Ctrl+_ brings it back" in banner(app)
        await pilot.press(back)
        assert app.chat.composer.written == before
        assert app.is_running

    play(Stage(tmp_path), what)


def test_ctrl_c_that_cleared_is_not_the_first_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localchat.tui.app._DOUBLE_PRESS_S", 3600.0)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press("a", "ctrl+c", "ctrl+c")
        assert app.is_running and app.return_code is None
        assert "Ctrl+C again to quit" in banner(app)
        await pilot.press("ctrl+c")
        await until(pilot, lambda: app.return_code == 0)

    play(Stage(tmp_path), what)


def test_ctrl_c_stops_the_answer_and_keeps_the_draft(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.composer.write("go")
        await pilot.press("enter")
        await until(pilot, lambda: app.session.status.state == "writing")
        await pilot.press(*"next", "ctrl+c")
        await until(pilot, lambda: not app.session.busy)
        assert app.chat.composer.text == "next"

    play(Stage(tmp_path, script=held(Text(0, "so "))), what)


@pytest.mark.parametrize("between", [("x", "backspace"), ("x",), ("left",)])
def test_a_key_between_two_ctrl_c_keeps_the_program_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: tuple[str, ...]
) -> None:
    monkeypatch.setattr("localchat.tui.app._DOUBLE_PRESS_S", 3600.0)

    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press("ctrl+c", *between, "ctrl+c")
        assert app.is_running and app.return_code is None
        assert app.chat.composer.text == ""

    play(Stage(tmp_path), steps)


def test_a_draft_is_cleared_before_ctrl_c_quits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localchat.tui.app._DOUBLE_PRESS_S", 3600.0)

    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.composer.write("go")
        await pilot.press("enter")
        await until(pilot, lambda: app.session.status.state == "writing")
        await pilot.press(*"next", "ctrl+c")
        assert "Ctrl+C again clears the message" in banner(app)
        await pilot.press("ctrl+c")
        assert app.chat.composer.text == "" and app.return_code is None
        await until(pilot, lambda: not app.session.busy)
        await pilot.press("ctrl+c", "ctrl+c")
        await until(pilot, lambda: app.return_code == 0)

    play(Stage(tmp_path, script=held(Text(0, "so "))), steps)


def test_an_unusable_history_is_no_saved_conversation_and_ctrl_r_opens_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        history = app.recorder.history
        assert history is not None
        app.recorder.close()
        app.recorder.fail(HistoryUnusable("the disk is full"))
        await say(pilot, "one")
        hints: list[str] = []
        monkeypatch.setattr(app.chat, "hint", hints.append)
        await pilot.press("ctrl+c")
        assert "Ctrl+C again to quit; this conversation is not saved" in hints
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.screen, HistoryScreen))
        app.recorder.flush()
        with History.open(tmp_path / "history.sqlite3") as other:
            assert [summary.title for summary in other.list()] == ["one"]

    play(Stage(tmp_path), steps)


def test_ctrl_c_copies_a_selection_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    monkeypatch.setattr("localchat.tui.clipboard.send", lambda text, *_: copied.append(text))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press(*"keep me", "shift+left", "shift+left", "ctrl+c")
        await until(pilot, lambda: copied == ["me"])
        assert app.chat.composer.text == "keep me"

    play(Stage(tmp_path), what)


def test_ctrl_c_leaves_a_changed_question_as_it_was(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "first")
        await pilot.press(*"draft", "f6", "!", "ctrl+c")
        assert app.chat.composer.text == "draft"

    play(Stage(tmp_path, script=lambda request: told("yes")), what)


def test_ctrl_c_closes_a_dialog(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await pilot.press("ctrl+c")
        await until(pilot, lambda: app.screen is app.chat)
        assert app.is_running

    play(Stage(tmp_path), what)


def test_without_a_shell_nothing_is_suspended(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press(*"text", "ctrl+z")
        assert "no shell" in banner(app)
        assert app.chat.composer.text == "text"

    play(Stage(tmp_path), what)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_ctrl_z_goes_to_the_shell_and_fg_shows_the_screen_again(tmp_path: Path) -> None:
    program = Program(tmp_path, shell=("bash", "--norc", "--noprofile", "-i"))
    try:
        program.type(f"PS1='sh> '; {shlex.join(PROGRAM)}\r")
        program.see("talking to the built-in guide")
        program.type("a draft")
        program.see("│ a draft")
        program.type("\x1a")
        program.see("Stopped")
        assert program.raw.count(b"\x1b[?1049l") == 1
        program.type("clear; echo back in the $((40 + 2))\r")
        program.see("back in the 42")
        program.type("fg\r")
        program.see("talking to the built-in guide")
        program.see("│ a draft")
        program.type(" goes on")
        program.see("│ a draft goes on")
        program.type("\x11")
        # what is typed before the shell is back goes to the program, which drops it as it ends
        leave = b"\x1b[?1049l"
        program.until(
            lambda: program.raw.count(leave) == 2 and b"sh> " in program.raw.rpartition(leave)[2]
        )
        program.type("exit\r")
        assert program.end() == 0
    finally:
        program.close()


def test_a_program_without_a_shell_around_it_stays(tmp_path: Path) -> None:
    program = Program(tmp_path)
    try:
        program.see("talking to the built-in guide")
        program.type("\x1a")
        program.see("no shell to go back to")
        program.type("still here")
        program.see("│ still here")
    finally:
        program.close()
