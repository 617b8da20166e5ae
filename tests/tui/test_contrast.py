"""Text is readable on its ground in the light theme and in the dark one."""

import asyncio
from pathlib import Path

import pytest
from rich.color import Color
from rich.color_triplet import ColorTriplet

from localchat.tui.screens import models
from localchat.tui.transcript.strips import contrast
from tests.support.tui_scenes import SCENES
from tests.support.tui_stage import GB, Stage

LEAST = 4.4
"""Blends are rounded; 4.5 is the aim."""
_DRAWN = " ─│╭╮╰╯━▎▌▔·●◆↓▁▂▃▄▅▆▇█"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "name", ["first-run", "commands", "models", "panel", "parameters", "history-search", "settings"]
)
def test_text_stands_out_from_its_ground(
    name: str, theme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "_room_bytes", lambda: 12 * GB)
    scene = SCENES[name]
    changes = {**scene.stage.get("changes", {}), "theme": theme}
    pale: dict[str, float] = {}

    async def play() -> None:
        async with Stage(tmp_path, **{**scene.stage, "changes": changes}).play(80, 24) as pilot:
            await scene.act(pilot)
            await pilot.pause(0.1)
            screen = pilot.app.screen
            dialogs = screen.query("#dialog")  # what is behind one is dimmed
            region = dialogs.first().region if dialogs else screen.region
            for y, strip in enumerate(screen._compositor.render_strips()):
                if region.y <= y < region.bottom:
                    for text, style, _ in strip.crop(region.x, region.right):
                        if style and style.color and style.bgcolor and text.strip(_DRAWN):
                            pale[text] = contrast(_triplet(style.color), _triplet(style.bgcolor))

    asyncio.run(play())
    assert len(pale) > 5
    assert not {text: ratio for text, ratio in pale.items() if ratio < LEAST}


def _triplet(color: Color) -> ColorTriplet:
    return color.get_truecolor()
