"""The help: the essentials first, and a filter."""

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from localchat.session.commands import COMMANDS
from localchat.tui.keymap import KEYS
from localchat.tui.screens.help import HelpScreen, help_lines
from tests.support.tui_stage import Stage, app_of, play, until


def shown(pilot: Pilot[int]) -> str:
    return str(pilot.app.screen.query_one("#help-lines", Static).render())


def test_everything_is_in_it_and_the_essentials_come_first() -> None:
    lines = list(help_lines({"composer.send": "ctrl+s"}))
    sections = list(dict.fromkeys(line.section for line in lines))
    assert sections[:2] == ["Essentials", "Commands"]
    assert lines[0].keys == "Ctrl+S", "keys are those of the settings"
    assert {line.name for line in lines} >= {key.id for key in KEYS}
    text = "\n".join(line.keys for line in lines)
    assert all(f"/{command.name}" in text for command in COMMANDS)
    told = {line.name: line.about for line in lines}
    assert told["chat.leave"] == "Quit if the input is empty"
    assert told["chat.undo"] == "Undo the last question"


@pytest.mark.parametrize(
    ("words", "found", "missing"),
    [
        ("previous question", "Alt+Up", "/model"),
        ("COPY code", "/copy", "Ctrl+N"),
        ("chat.new", "Ctrl+N", "Ctrl+T"),
        ("nowhere", "nothing about nowhere", "Enter"),
    ],
)
def test_a_filter_leaves_what_has_the_words(
    tmp_path: Path, words: str, found: str, missing: str
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await until(pilot, lambda: "Essentials" in shown(pilot))
        await pilot.press(*words)
        await until(pilot, lambda: found in shown(pilot))
        assert missing not in shown(pilot)
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.chat)

    play(Stage(tmp_path), what)


def test_the_arrows_scroll_while_the_filter_has_the_focus(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))
        text = pilot.app.screen.query_one("#help-text")
        await until(pilot, lambda: text.max_scroll_y > 13)  # before, there is nothing to scroll
        await pilot.press("pagedown")
        await until(pilot, lambda: text.scroll_y == text.scroll_target_y > 1)
        page = text.scroll_y
        await pilot.press("down")
        await until(pilot, lambda: text.scroll_y == page + 1)
        await pilot.press("q")
        assert isinstance(pilot.app.screen, HelpScreen), "a letter goes into the filter"

    play(Stage(tmp_path), what)
