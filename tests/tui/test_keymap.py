"""Every key of the registry does what it says, and other keys can be given."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual._xterm_parser import XTermParser
from textual.pilot import Pilot
from textual.widgets import Static

from localchat.errors import UsageError
from localchat.tui.keymap import KEYS, key_names, validate_keymap
from localchat.tui.screens.help import HelpScreen
from localchat.tui.screens.history import HistoryScreen
from localchat.tui.screens.models import ModelScreen
from localchat.tui.screens.parameters import ParameterScreen
from localchat.tui.screens.settings import SettingsScreen
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tui_stage import Stage, app_of, footer, play, say, sent, told, until


def answers(*texts: str) -> Callable[[object], ScriptedAnswer]:
    left = list(texts)
    return lambda request: told(left.pop(0) if len(left) > 1 else left[0])


def test_letters_that_are_not_seen_are_written(tmp_path: Path) -> None:
    words = "\u0645\u06cc\u200c\u062e \u65e5\u3000\u672c 12\u00a0km \U0001f469\u200d\U0001f467"

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        for event in XTermParser().feed(f"{words}\u202e\u00ad"):
            app.post_message(event)
        await until(pilot, lambda: app.chat.composer.text == words)

    play(Stage(tmp_path), what)


def test_a_word_above_the_composer_has_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        chat = app_of(pilot).chat
        monkeypatch.setattr("localchat.tui.widgets.banner._HINT_S", 0.1)
        chat.hint("one")
        monkeypatch.setattr("localchat.tui.widgets.banner._HINT_S", 3600.0)
        chat.hint("two")
        await asyncio.sleep(0.3)
        assert str(chat.query_one("#banner", Static).render()) == "two"
        assert chat.query_one("#banner", Static).display

    play(Stage(tmp_path), what)


def test_writing_sending_and_the_messages_of_before(tmp_path: Path) -> None:
    stage = Stage(tmp_path, script=answers("yes"))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        composer = app.chat.composer
        await pilot.press("h", "i", "ctrl+j", "y", "o", "u", "enter")
        await until(pilot, lambda: len(stage.engine.requests) == 1 and not app.session.busy)
        assert sent(stage.engine.requests[0]) == [("user", "hi\nyou")]
        assert composer.text == ""
        await say(pilot, "second")
        await pilot.press("d", "up")
        assert composer.text == "second"
        await pilot.press("up")
        assert composer.text == "hi\nyou"
        await pilot.press("down", "down", "down")
        assert composer.text == "d"
        await pilot.press("enter")
        await until(pilot, lambda: len(stage.engine.requests) == 3 and not app.session.busy)
        await pilot.press("enter")
        await pilot.pause()
        assert len(stage.engine.requests) == 3, "an empty message is not sent"

    play(stage, what)


def test_escape_stops_and_f7_goes_on(tmp_path: Path) -> None:
    def script(request: Any) -> ScriptedAnswer:
        slow = ScriptedAnswer(("begun ", *("." for _ in range(20_000))), gap_s=0.01)
        return told("end") if request.prompt.continue_last else slow

    stage = Stage(tmp_path, script=script)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.composer.write("go")
        await pilot.press("enter")
        await until(pilot, lambda: app.session.status.state == "writing")
        app.chat.composer.write("more")
        await pilot.press("enter")
        await pilot.press("escape")
        await until(pilot, lambda: not app.session.busy)
        await until(pilot, lambda: app.chat.composer.text == "more")
        assert app.session.last_answer().state == "stopped"  # type: ignore[union-attr]
        assert "F7 continue" in footer(app)
        await pilot.press("f7")
        await until(pilot, lambda: app.session.last_answer().state == "whole")  # type: ignore[union-attr]
        assert app.session.last_answer().message.content.endswith("end")  # type: ignore[union-attr]

    play(stage, what)


def test_ctrl_c_stops_and_twice_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localchat.tui.app._DOUBLE_PRESS_S", 3600.0)
    stage = Stage(tmp_path, script=lambda request: ScriptedAnswer(("a",) * 20_000, gap_s=0.01))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.composer.write("go")
        await pilot.press("enter")
        await until(pilot, lambda: app.session.status.state == "writing")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not app.session.busy)
        assert app.is_running
        await pilot.press("ctrl+c")
        assert app.return_code == 0

    play(stage, what)


def test_keys_that_come_faster_than_they_are_handled_keep_their_order(tmp_path: Path) -> None:
    stage = Stage(tmp_path, script=answers("yes"))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)

        def type_at_once(*keys: str) -> None:
            for key in keys:
                app.post_message(
                    events.Key(key, " " if key == "space" else key if len(key) == 1 else None)
                )

        type_at_once(*"hi", "enter", *"next")
        await until(pilot, lambda: stage.engine.requests and not app.session.busy)
        assert sent(stage.engine.requests[0]) == [("user", "hi")]
        await until(pilot, lambda: app.chat.composer.text == "next")
        app.chat.composer.write("")
        type_at_once("/", *"set", "space", *"seed", "space", "7", "enter", "x")
        await until(pilot, lambda: app.session.setup.settings.seed == 7)
        await until(pilot, lambda: app.chat.composer.text == "x")
        app.chat.composer.write("")
        type_at_once(*"abd", "backspace", *"c", "left", *"X", "end", "ctrl+j", *"Y", "home", *"Z")
        await until(pilot, lambda: app.chat.composer.text == "abXc\nZY")

    play(stage, what)


def test_ctrl_d_leaves_only_where_nothing_is_written(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press("a", "b", "left", "ctrl+d")
        assert app.chat.composer.text == "a"
        await pilot.press("backspace", "ctrl+d")
        await until(pilot, lambda: app.return_code == 0)

    play(Stage(tmp_path), what)


def test_regenerate_edit_undo_branches_by_key(tmp_path: Path) -> None:
    stage = Stage(tmp_path, script=answers("one", "two", "three"))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        session = app.session

        def text() -> str:
            node = session.last_answer()
            return node.message.content if node else ""

        await say(pilot, "q")
        await pilot.press("f5")
        await until(pilot, lambda: text() == "two" and not session.busy)
        await pilot.press("alt+left")
        assert text() == "one"
        await pilot.press("alt+right")
        assert text() == "two"
        await pilot.press("f6")
        assert app.chat.composer.text == "q"
        await pilot.press("escape")
        assert app.chat.composer.text == ""
        await pilot.press("f6", "!", "enter")
        await until(pilot, lambda: text() == "three" and not session.busy)
        assert session.last_question().message.content == "q!"  # type: ignore[union-attr]
        await pilot.press("f8")
        assert session.conversation.head is None
        assert app.chat.composer.text == "q!"

    play(stage, what)


@pytest.mark.parametrize(
    ("key", "screen"),
    [
        ("f1", HelpScreen),
        ("f2", SettingsScreen),
        ("f3", ModelScreen),
        ("f4", ParameterScreen),
        ("ctrl+r", HistoryScreen),
    ],
)
def test_screens_open_and_escape_closes_them(tmp_path: Path, key: str, screen: type) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await pilot.press(key)
        await until(pilot, lambda: isinstance(pilot.app.screen, screen))
        await pilot.press("escape")
        await until(pilot, lambda: pilot.app.screen is app_of(pilot).chat)
        await pilot.press("x")
        assert app_of(pilot).chat.composer.text == "x"

    play(Stage(tmp_path), what)


def test_the_panel_themes_and_thinking(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.chat.panel.display)
        await until(pilot, lambda: app.session.status.stats is not None)
        await pilot.press("tab")
        assert app.chat.panel.has_focus
        await pilot.press("ctrl+o")
        await until(pilot, lambda: not app.chat.panel.display)
        before = app.theme
        await pilot.press("f10")
        assert app.theme != before
        assert "Theme: light, F2 to save" in str(app.chat.query_one("#banner").render())
        await pilot.press("ctrl+t")
        await until(pilot, lambda: app.session.setup.settings.think == "on")

    play(Stage(tmp_path), what)


def test_keys_in_the_transcript(tmp_path: Path) -> None:
    stage = Stage(tmp_path, script=answers("one", "two"))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        copied: list[str] = []
        app.chat.copy = lambda text, what: copied.append(text)  # type: ignore[method-assign]
        await say(pilot, "q")
        await pilot.press("tab")
        assert app.chat.transcript.has_focus
        assert app.chat.transcript.focused_id == app.session.last_answer().id  # type: ignore[union-attr]
        await pilot.press("y", "up", "y", "k", "j")
        assert copied == ["one", "q"]
        await pilot.press("r")
        await until(pilot, lambda: len(stage.engine.requests) == 2 and not app.session.busy)
        await pilot.press("left_square_bracket")
        assert app.session.last_answer().message.content == "one"  # type: ignore[union-attr]
        await pilot.press("right_square_bracket")
        assert app.session.last_answer().message.content == "two"  # type: ignore[union-attr]
        app.chat.transcript.focus()
        await pilot.press("up", "up", "e")
        assert app.chat.composer.text == "q"
        await pilot.press("escape")
        app.chat.transcript.focus()
        await pilot.press("tab")
        assert app.chat.composer.editor.has_focus
        await pilot.press("f9")
        assert copied[-1] == "two"

    play(stage, what)


def test_finding_and_moving_about(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path, script=lambda request: told(*("a line with a needle\n\n" for _ in range(30)))
    )

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "zz")
        view = app.chat.transcript
        await until(pilot, lambda: view.scroll_y == view.max_scroll_y > 0)
        await pilot.press("pageup")
        await until(pilot, lambda: view.scroll_y < view.max_scroll_y)
        await pilot.press("ctrl+end")
        await until(pilot, lambda: view.scroll_y == view.max_scroll_y)
        await pilot.press("pageup", "pagedown")

    play(stage, what)


def test_a_long_paste_is_a_chip_that_goes_as_a_whole(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        editor = app.chat.composer.editor
        editor.insert_paste("short\r\npaste\x1b[31m")
        assert editor.text == "short\npaste␛[31m"
        editor.write("")
        editor.insert_paste("line\n" * 500)
        assert editor.text == "⟦paste 1, 500 lines⟧ "
        await pilot.press("backspace", "backspace")
        assert editor.text == "", "a sign goes as a whole"
        editor.insert_paste("line\n" * 500)
        await pilot.press("enter")
        await until(pilot, lambda: stage.engine.requests and not app.session.busy)
        assert sent(stage.engine.requests[0])[0][1].startswith("line\nline\n")
        assert app.session.last_question().inclusions[0].label == "paste 2, 500 lines"  # type: ignore[union-attr]

    play(stage, what)


def test_other_keys_can_be_given(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keys={"composer.send": "ctrl+s", "screen.help": "f11"})

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press("a", "enter", "b")
        assert app.chat.composer.text == "a\nb"
        await pilot.press("ctrl+s")
        await until(pilot, lambda: stage.engine.requests and not app.session.busy)
        await pilot.press("f11")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))

    play(stage, what)


def test_a_wrong_table_of_keys_is_a_notice_and_the_keys_stay(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await until(pilot, lambda: app.chat.transcript.blocks)
        assert "chat.nwe" in app.chat.transcript.blocks[0].text  # type: ignore[union-attr]
        assert "did you mean chat.new" in app.chat.transcript.blocks[0].text  # type: ignore[union-attr]

    play(Stage(tmp_path, keys={"chat.nwe": "f12"}), what)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"chat.nwe": "f9"}, "chat.nwe"),
        ({"chat.new": "ctrl+kk"}, "ctrl+kk"),
        ({"chat.new": "f5"}, "chat.regenerate"),
        ({"composer.send": "ctrl+o"}, "view.panel"),
    ],
)
def test_what_is_wrong_with_keys_is_named(table: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError) as problem:
        validate_keymap(table)
    assert named in str(problem.value)


def test_the_keys_that_come_with_the_program_are_right() -> None:
    assert validate_keymap({}) == {}
    assert validate_keymap({key.id: key.keys for key in KEYS})
    assert len({key.id for key in KEYS}) == len(KEYS)
    assert key_names("composer.newline", {}).startswith("Ctrl+J, Shift+Enter")
    assert key_names("composer.newline", {"composer.newline": "f12"}) == "F12"
