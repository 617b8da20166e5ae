"""Keys that come while a screen opens reach it."""

import asyncio
from pathlib import Path

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import Input

from localchat.tui.screens.history import HistoryScreen
from tests.support.tui_stage import Stage, app_of, check_runs, play, until


@pytest.mark.parametrize("key", ["ctrl+r", "f1", "f2", "f3", "f4"])
def test_what_is_typed_while_a_dialog_opens_stands_in_its_filter(tmp_path: Path, key: str) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press(key)
        await until(pilot, lambda: app.screen is not app.chat)
        for _ in range(2):
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is app.chat)
            app.post_message(events.Key(key, None))
            while app.screen is app.chat:
                check_runs(app)
                await asyncio.sleep(0)
            for letter in "abx":  # nothing is composed yet
                app.post_message(events.Key(letter, letter))
            app.post_message(events.Key("backspace", None))
            app.post_message(events.Key("c", "c"))
            app.post_message(events.Paste("def"))
            await until(pilot, lambda: _typed(app.screen) == "abcdef")
            assert app.chat.composer.text == ""

    play(Stage(tmp_path), what)


def _typed(screen: object) -> str:
    return next((field.value for field in screen.query(Input)), "")  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", ["ctrl+s", "delete", "ctrl+z", "down", "enter"])
def test_an_action_key_while_the_history_opens_finds_the_list(tmp_path: Path, key: str) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        history = app.recorder.history
        assert history is not None
        app.push_screen(HistoryScreen(history))
        app.post_message(events.Key(key, None))
        app.post_message(events.Key("a", "a"))
        await until(pilot, lambda: _typed(app.screen) == "a")

    play(Stage(tmp_path), what)
