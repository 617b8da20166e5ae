"""Pictures of every state of the screen, looked at before they were kept. Both sizes of a state come from one
start: the window is made larger in between, as a person does."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytest_textual_snapshot import (  # type: ignore[import-untyped]
    SVGImageExtension,
    normalize_svg,
)
from syrupy.assertion import SnapshotAssertion

from localchat.tools import command, loop
from localchat.tui.screens import consent, history, models
from tests.support.tui_scenes import SCENES
from tests.support.tui_stage import GB, Stage, check_runs

KEPT = Path(__file__).with_name("__snapshots__") / "test_snapshots"
_PATIENCE_S = 90.0
"""A picture that is right ends the wait at once; one that stays wrong for so long is wrong."""
_LOOK_EVERY_S = 0.03
_NEW_S = 2.0
_STILL_S = 0.12
"""A picture without a stored one is taken once it did not change for so long, at the latest after `_NEW_S`."""


def kept(name: str, size: str) -> str:
    """The picture as it was looked at; empty where there is none yet."""
    path = KEPT / f"test_the_screen_looks_as_it_did[{name}][{size}].svg"
    return str(normalize_svg(path.read_text("utf-8"))) if path.exists() else ""


async def _isolated(isolation: command.Isolation) -> tuple[str, ...]:
    return ("env",)


@pytest.fixture(autouse=True)
def _fixed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine, the day and the ids are the same every time."""
    monkeypatch.setattr(models, "_room_bytes", lambda: 12 * GB)
    monkeypatch.setattr(history, "moment", lambda unix_s: "2026-11-21 12:00")
    monkeypatch.setattr(history, "_when", lambda seconds: "3 min")
    monkeypatch.setattr(history, "_short", lambda id_: "01a1fec52270")
    # Calls take no time, commands are isolated, and keys need no pause before them.
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(command.Isolation, "prefix", _isolated)
    monkeypatch.setattr(consent, "_CALM_S", 0.0)


@pytest.mark.parametrize("name", SCENES)
def test_the_screen_looks_as_it_did(
    name: str, tmp_path: Path, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scene = SCENES[name]
    pictures: dict[str, str] = {}

    async def play() -> None:
        stage = Stage(tmp_path, **scene.stage)
        patience_s = _PATIENCE_S
        async with stage.play(*scene.sizes[0]) as pilot:
            await scene.act(pilot)
            for width, height in scene.sizes:
                await pilot.resize_terminal(width, height)
                looked_at, before = kept(name, f"{width}x{height}"), ""
                end = time.monotonic() + (patience_s if looked_at else _NEW_S)
                while time.monotonic() < end:
                    # Heights of what was never seen and verdicts on models come in their own time.
                    await pilot.pause(_LOOK_EVERY_S if looked_at else _STILL_S)
                    check_runs(pilot.app)
                    picture = pilot.app.export_screenshot(title=name)
                    still = picture == before and not looked_at
                    if still or normalize_svg(picture) == looked_at:
                        break
                    before = picture
                else:
                    patience_s = _NEW_S  # what is wrong in one size is wrong in the others, too
                pictures[f"{width}x{height}"] = picture

    asyncio.run(play())
    for size, picture in pictures.items():
        assert picture == snapshot(extension_class=SVGImageExtension, name=size)
