"""Moving between questions, and the corner of a code block."""

from pathlib import Path

import pytest
from textual.pilot import Pilot

from localchat.tui.app import ChatApp
from localchat.tui.screens.help import HelpScreen
from localchat.tui.transcript import widget
from tests.support.tui_stage import Stage, app_of, play, say, told, until

LONG = "\n\n".join(f"Line {n} of an answer." for n in range(40))
CODE = "First:\n\n```python\nx = 1\n```\n\nthen:\n\n```sh\nls # a\n```\n\nDone."


def top_row(app: ChatApp) -> str:
    """The first row on the screen that is not blank."""
    rows = (app.chat.transcript.render_line(y).text.strip() for y in range(4))
    return next(filter(None, rows))


def row_of(app: ChatApp, text: str) -> int:
    height = app.chat.transcript.size.height
    rows = [app.chat.transcript.render_line(y).text for y in range(height)]
    return next(y for y, row in enumerate(rows) if text in row)


async def three(pilot: Pilot[int]) -> None:
    for number in (1, 2, 3):
        await say(pilot, f"question {number}")


def test_a_key_goes_from_question_to_question(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await three(pilot)
        for number in (3, 2, 1):
            await pilot.press("alt+up")
            assert f"question {number}" in top_row(app)
        await pilot.press("alt+up")
        assert "no question before" in str(app.chat.query_one("#banner").render())
        assert "question 1" in top_row(app)
        for number in (2, 3):
            await pilot.press("alt+down")
            assert f"question {number}" in top_row(app)
        await pilot.press("alt+down")
        assert app.chat.transcript.following
        assert app.chat.transcript.focused_id is None
        assert app.chat.composer.editor.has_focus

    play(Stage(tmp_path, script=lambda request: told(LONG)), what)


def test_it_starts_from_what_is_on_the_screen(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await three(pilot)
        await pilot.press("alt+up", "alt+up", "escape", "pagedown")
        assert "Line" in top_row(app)
        await pilot.press("alt+up")
        assert "question 2" in top_row(app)
        await pilot.press("escape", "pagedown", "alt+down")
        assert "question 3" in top_row(app)

    play(Stage(tmp_path, script=lambda request: told(LONG)), what)


def test_the_question_that_was_gone_to_is_the_one_that_is_edited(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await three(pilot)
        await pilot.press("alt+up", "alt+up", "f6")
        assert app.chat.composer.text == "question 2"

    play(Stage(tmp_path, script=lambda request: told(LONG)), what)


def test_without_a_question_it_says_so(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await pilot.press("alt+down", "alt+up")
        assert "no question" in str(app_of(pilot).chat.query_one("#banner").render())

    play(Stage(tmp_path), what)


def test_help_opens_over_it(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))

    play(Stage(tmp_path), what)


# ---------------------------------------------------------------------------- code


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr("localchat.tui.clipboard.send", lambda text, *_: found.append(text))
    return found


@pytest.mark.parametrize(
    ("label", "code", "name"),
    [("python · 1", "x = 1\n", "code 1 of 2"), ("sh · 2", "ls # a\n", "code 2 of 2")],
)
@pytest.mark.parametrize("width", [80, 200])
def test_a_click_on_the_corner_copies_the_block(
    tmp_path: Path, copied: list[str], label: str, code: str, name: str, width: int
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "code")
        row = row_of(app, label)
        column = app.chat.transcript.render_line(row).text.index("copy")
        await until(pilot, lambda: app.chat.transcript.region.x == (45 if width == 200 else 0))
        await pilot.click(app.chat.transcript, offset=(column + 1, row))
        await until(pilot, lambda: copied == [code])
        assert f"Copied {name}" in str(app.chat.query_one("#banner").render())
        assert app.chat.transcript.render_line(row).text.count("copied") == 1

    play(Stage(tmp_path, script=lambda request: told(CODE)), what, width, 30)


def test_the_corner_says_copied_only_briefly(
    tmp_path: Path, copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "code")
        row = row_of(app, "python · 1")
        column = app.chat.transcript.render_line(row).text.index("copy")
        await pilot.click(app.chat.transcript, offset=(column + 1, row))
        await until(pilot, lambda: copied == ["x = 1\n"])
        await until(
            pilot, lambda: app.chat.transcript.render_line(row).text.rstrip().endswith("  copy")
        )

    monkeypatch.setattr(widget, "_COPIED_S", 0.01)
    play(Stage(tmp_path, script=lambda request: told(CODE)), what)


def test_a_click_beside_the_corner_copies_nothing(tmp_path: Path, copied: list[str]) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "code")
        row = row_of(app, "python · 1")
        await pilot.click(app.chat.transcript, offset=(20, row))
        await pilot.click(app.chat.transcript, offset=(6, row + 1))
        await pilot.pause()
        assert copied == []

    play(Stage(tmp_path, script=lambda request: told(CODE)), what)


def test_the_corner_is_no_part_of_a_selection(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "code")
        app.chat.text_select_all()
        assert "copy" not in (app.chat.get_selected_text() or "copy")

    play(Stage(tmp_path, script=lambda request: told(CODE)), what)


def test_a_narrow_window_leaves_the_corner_out(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "code")
        text = "\n".join(app.chat.transcript.render_line(y).text for y in range(10))
        assert "sh · 2" in text and "copy" not in text

    play(Stage(tmp_path, script=lambda request: told(CODE)), what, 18, 14)
