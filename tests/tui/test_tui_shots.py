"""Pictures of every state of the screen, looked at before they were kept. Both sizes of a state come from one
start: the window is made larger in between, as a person does."""

import asyncio
from pathlib import Path

import pytest
from pytest_textual_snapshot import SVGImageExtension  # type: ignore[import-untyped]
from syrupy.assertion import SnapshotAssertion

from localchat.tui.screens import history, models
from tests.tui.scenes import SCENES
from tests.tui.stage import GB, Stage


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine, the day and the ids are the same every time."""
    monkeypatch.setattr(models, "_room_bytes", lambda: 12 * GB)
    monkeypatch.setattr(history, "_date", lambda seconds: "2026-11-21 12:00")
    monkeypatch.setattr(history, "_when", lambda seconds: "3 min")
    monkeypatch.setattr(history, "_short", lambda id_: "01a1fec52270")


@pytest.mark.parametrize("name", SCENES)
def test_the_screen_looks_as_it_did(
    name: str, tmp_path: Path, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scene = SCENES[name]
    pictures: dict[str, str] = {}

    async def play() -> None:
        stage = Stage(tmp_path, **scene.stage)
        async with stage.play(*scene.sizes[0]) as pilot:
            await scene.act(pilot)
            for width, height in scene.sizes:
                await pilot.resize_terminal(width, height)
                before = ""
                for _ in range(30):  # heights of what was never seen are corrected in between
                    await pilot.pause(0.12)
                    picture = pilot.app.export_screenshot(title=name)
                    if picture == before:
                        break
                    before = picture
                pictures[f"{width}x{height}"] = picture

    asyncio.run(play())
    for size, picture in pictures.items():
        assert picture == snapshot(extension_class=SVGImageExtension, name=size)
