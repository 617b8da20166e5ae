"""Consent to tool calls on the screen, and calls in the transcript."""

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textual.pilot import Pilot

from localchat.chat.conversation import ToolRun
from localchat.session.blocks import ToolCallBlock
from localchat.tools.consent import Decision
from localchat.tools.tool import Plan, Tool
from localchat.tui.consent import ScreenConsent
from localchat.tui.screens import consent
from localchat.tui.transcript.block_rows import block_rows
from tests.support.tui_stage import Stage, play, until


async def never(_: object) -> Any:
    raise AssertionError("the question does not run the call")


PLAN = Plan(
    partial(never, None),
    "edit notes.md",
    "edit",
    "all edits of notes.md",
    "--- notes.md\n+++ notes.md\n@@ -1 +1 @@\n-from 9\n+from 8\x1b[2J",
)
EDIT = (Tool("edit_file", "", {}, "write", never), PLAN)


def rows_of(block: ToolCallBlock, *, is_open: bool = False) -> str:
    laid_out = block_rows(block, 80, is_open=is_open)
    return "\n".join("".join(piece.text for piece in row.pieces) for row in laid_out.rows)


@pytest.fixture(autouse=True)
def _calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "_CALM_S", 0.0)


@pytest.mark.parametrize(
    ("keys", "decision"),
    [
        (["y"], "once"),
        (["enter"], "once"),
        (["s"], "session"),
        (["n"], "no"),
        (["escape"], "no"),
        (["down", "down", "down", "enter"], "never"),
    ],
)
def test_a_key_decides(tmp_path: Path, keys: list[str], decision: Decision) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        asked = asyncio.create_task(ScreenConsent(pilot.app).ask(*EDIT))
        await until(pilot, lambda: isinstance(pilot.app.screen, consent.ConsentScreen))
        shown = str(pilot.app.screen.query_one("#preview Static").visual)  # type: ignore[attr-defined]
        assert "+from 8" in shown and "\x1b" not in shown
        await pilot.press(*keys)
        assert await asked == decision

    play(Stage(tmp_path), steps)


def test_keys_of_somebody_who_still_types_are_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consent, "_CALM_S", 3600.0)

    async def steps(pilot: Pilot[int]) -> None:
        asked = asyncio.create_task(ScreenConsent(pilot.app).ask(*EDIT))
        await until(pilot, lambda: isinstance(pilot.app.screen, consent.ConsentScreen))
        await pilot.press(*"yes no", "enter")
        assert not asked.done()
        asked.cancel()
        await asyncio.wait([asked])
        await until(pilot, lambda: not isinstance(pilot.app.screen, consent.ConsentScreen))

    play(Stage(tmp_path), steps)


def test_a_key_after_a_pause_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(consent, "_CALM_S", 0.7)
    monkeypatch.setattr(consent, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def steps(pilot: Pilot[int]) -> None:
        for keys, decision in ((("y",), "once"), (("down", "enter"), "session")):
            asked = asyncio.create_task(ScreenConsent(pilot.app).ask(*EDIT))
            await until(pilot, lambda: isinstance(pilot.app.screen, consent.ConsentScreen))
            clock.now += 0.1
            await pilot.press("o", "y", "enter")
            clock.now += 0.3
            await pilot.press("y")
            assert not asked.done()
            clock.now += 1.0
            await pilot.press(*keys)
            assert await asked == decision

    play(Stage(tmp_path), steps)


def test_a_call_shows_its_state_and_opens_to_its_result() -> None:
    block: Any = ToolCallBlock("a/call/0", "read_file", '{"path": "notes.md"}')
    assert "asked for, not run" in rows_of(block)
    running = block._replace(run=ToolRun("running", "read notes.md"))
    assert "read notes.md" in rows_of(running) and "Esc stops it" in rows_of(running)
    done = block._replace(run=ToolRun("done", "read notes.md", 0.31, 1204), result="from 9\nto 17")
    assert "0.3 s · 1,204 characters" in rows_of(done)
    assert "from 9" not in rows_of(done)
    assert "from 9" in rows_of(done, is_open=True) and '"path"' in rows_of(done, is_open=True)
    failed = block._replace(run=ToolRun("failed", "", 0.1, 20), result="Error: no such file")
    assert "failed" in rows_of(failed) and "no such file" in rows_of(failed)
