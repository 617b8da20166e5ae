"""In a wide window the conversation is a column of readable width in the middle."""

from pathlib import Path

import pytest
from textual.pilot import Pilot

from localchat.tui.column import COLUMN_CELLS, column_margins
from tests.support.tui_stage import Stage, app_of, play, say, told, until

TEXT = "word " * 120


@pytest.mark.parametrize("window", [160, 161, 200, 240, 500])
def test_the_column_is_in_the_middle(window: int) -> None:
    left, right = column_margins(window, 0)
    assert window - left - right == COLUMN_CELLS
    assert abs(right - left) <= 2


@pytest.mark.parametrize(("window", "taken"), [(40, 0), (120, 0), (159, 0), (160, 60)])
def test_a_narrower_window_is_used_in_full(window: int, taken: int) -> None:
    assert column_margins(window, taken) == (0, 0)


@pytest.mark.parametrize("has_panel", [False, True])
def test_text_composer_and_foot_stand_below_each_other(tmp_path: Path, has_panel: bool) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "hi")
        if has_panel:
            await pilot.press("ctrl+o")
        room = 200 - (46 if has_panel else 0)
        middle = (room - COLUMN_CELLS) // 2
        await until(pilot, lambda: abs(app.chat.transcript.region.x - middle) <= 1)
        await pilot.pause()
        left = app.chat.transcript.region.x
        for name in ("#composer", "#status", "#footer", "#heading"):
            region = app.chat.query_one(name).region
            assert (region.x, region.width) == (left, COLUMN_CELLS)
        rows = [app.chat.transcript.render_line(y).text.rstrip() for y in range(12)]
        assert 90 < max(map(len, rows)) <= COLUMN_CELLS
        if has_panel:
            assert app.chat.panel.region.right == 200

    play(Stage(tmp_path, script=lambda request: told(TEXT)), what, 200, 40)


def test_a_window_that_grows_and_shrinks_moves_the_column(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "hi")
        for width, left in ((200, 45), (120, 0), (160, 25), (80, 0)):
            await pilot.resize_terminal(width, 30)
            await until(pilot, lambda left=left: app.chat.transcript.region.x == left)  # type: ignore[misc]
            assert app.chat.composer.region.x == left
            assert app.chat.transcript.region.right == width

    play(Stage(tmp_path, script=lambda request: told(TEXT)), what)


def test_the_mouse_selects_what_it_is_on(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "hi")
        transcript = app.chat.transcript
        await until(pilot, lambda: transcript.region.x > 40)
        row = next(y for y in range(20) if "alpha" in transcript.render_line(y).text)
        x, y = transcript.region.x + 2 + len("alpha "), transcript.region.y + row
        await pilot.mouse_down(offset=(x, y))
        await pilot.hover(offset=(x + 3, y))
        await pilot.mouse_up(offset=(x + 3, y))
        await until(pilot, lambda: app.chat.get_selected_text() == "beta")

    play(Stage(tmp_path, script=lambda request: told("alpha beta gamma")), what, 200, 40)


def test_the_wheel_beside_the_column_scrolls_it(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "hi")
        transcript = app.chat.transcript
        await until(pilot, lambda: transcript.scroll_y == transcript.max_scroll_y > 150)
        assert transcript.region.x > 40
        await pilot._post_mouse_events([MouseScrollUp], offset=(3, 10), button=0)
        await until(pilot, lambda: transcript.scroll_y < transcript.max_scroll_y)

    from textual.events import MouseScrollUp

    long = "\n\n".join(f"Line {n}." for n in range(100))
    play(Stage(tmp_path, script=lambda request: told(long)), what, 200, 40)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_widgets_have_their_styles_at_the_first_frame(tmp_path: Path, width: int) -> None:
    """They are applied once, and applying them again changes nothing."""

    async def what(pilot: Pilot[int]) -> None:
        chat = app_of(pilot).chat
        before = {widget: widget.styles.css for widget in chat.walk_children()}
        chat.update_node_styles(animate=False)
        assert {widget: widget.styles.css for widget in chat.walk_children()} == before

    play(Stage(tmp_path), what, width=width)
