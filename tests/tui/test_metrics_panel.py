"""Where the panel of figures stands: it never covers half a line of the conversation."""

from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.support.tui_stage import Stage, app_of, footer, play, say, until


@pytest.mark.parametrize(
    ("width", "height", "beside", "below"),
    [(120, 40, True, False), (110, 18, True, False), (80, 24, False, True), (76, 20, False, True)],
)
def test_figures_and_conversation_share_the_screen(
    tmp_path: Path, width: int, height: int, beside: bool, below: bool
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "hi")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.chat.panel.region.area)
        talk, panel = app.chat.query_one("#talk").region, app.chat.panel.region
        assert talk.intersection(panel).area == 0
        assert (panel.x == talk.right, panel.y == talk.bottom) == (beside, below)
        assert talk.height >= 8
        assert talk.width >= 60
        await pilot.press("escape")
        assert app.chat.panel.display

    play(Stage(tmp_path), what, width, height)


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 18), (40, 12)])
def test_figures_without_room_take_the_place_of_the_conversation(
    tmp_path: Path, width: int, height: int
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "hi")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.chat.panel.region.area)
        assert app.chat.panel.region == app.chat.query_one("#body").region
        assert "Esc close" in (footer(app) if height > 15 else app.chat.status.hint)
        await pilot.press("tab")
        assert app.chat.panel.has_focus
        await pilot.press("escape")
        assert not app.chat.panel.display
        assert app.chat.composer.editor.has_focus

    play(Stage(tmp_path), what, width, height)


def test_the_mouse_marks_figures_in_both_columns(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "hi")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.chat.panel.region.area)
        await until(pilot, lambda: len(app.chat.panel._rows) > 20)
        await pilot.hover(app.chat.panel, (5, 4))
        left = app.chat.panel.marked
        await pilot.hover(app.chat.panel, (45, 4))
        assert app.chat.panel.marked == left + app.chat.panel._room
        rows = app.chat.panel._rows
        shown = app.chat.panel.render_line(4).text
        for at in (left, app.chat.panel.marked):
            assert "".join(piece.text for piece in rows[at].pieces).strip() in shown

    play(Stage(tmp_path), what)
