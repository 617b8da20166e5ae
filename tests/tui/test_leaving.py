"""Leaving the program ends with 0 at any moment, and keeps what was written."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from localchat.chat.conversation import Node
from localchat.engine.events import Done
from localchat.engine.interface import EngineInfo
from localchat.engine.options import EngineOptions
from localchat.history.store import History
from localchat.models.resolve import ResolvedModel
from localchat.tui import app as program
from localchat.tui.app import ChatApp
from localchat.tui.background_pull import BackgroundPull
from localchat.tui.widgets.composer import Composer
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tui_stage import HOLD, Stage, StagedEngine, told

Act = Callable[[ChatApp], Awaitable[object]]
MOMENTS = [0, 1, 2, 4, 8, 16, 32]
"""Rounds of the event loop."""


@dataclass
class Left:
    """A program that was left: its exit code, and what it kept."""

    code: int | None
    messages: tuple[Node, ...]
    draft: str


def left(stage: Stage, act: Act, rounds: int = 0) -> Left:
    """Show the screen, do something, wait some rounds of the event loop, and press Ctrl+D. An exception of a
    widget or a worker fails the test."""
    app = stage.app()

    async def play() -> None:
        async def user() -> None:
            await act(app)
            for _ in range(rounds):
                await asyncio.sleep(0)
            app.chat.action_leave_if_empty()
            while app.is_running:
                await asyncio.sleep(0.005)  # threads that are waited for need the interpreter, too

        playing = asyncio.create_task(user())
        async with app.run_test(size=(120, 30)):
            await asyncio.wait_for(playing, 90)

    asyncio.run(play())
    app.recorder.close()
    with History.open(stage.tmp / "history.sqlite3") as history:
        last = history.last()
        messages = history.load(last.id).path() if last is not None else ()
        return Left(app.return_code, messages, history.draft(last.id if last else None))


class LoadsLong(Stage):
    """Its models load until `loads` is set."""

    loads: threading.Event

    def open_engine(self, options: EngineOptions, say: Callable[[str], None]) -> StagedEngine:
        self.loads.wait()
        return super().open_engine(options, say)


class NotesLate(Stage):
    """Notes model and speed once `notes` is set."""

    notes: threading.Event

    def _remember(self, model: ResolvedModel, info: EngineInfo | None, done: Done | None) -> None:
        self.notes.wait()
        super()._remember(model, info, done)


async def passed(true: Callable[[], object]) -> None:
    """Wait until something is true."""
    while not true():
        await asyncio.sleep(0)


async def screen(app: ChatApp) -> None:
    await passed(lambda: app.chat.is_mounted)


async def loaded(app: ChatApp) -> None:
    """Wait until the model is loaded and the history is open."""
    await screen(app)
    await passed(lambda: app.session.status.info and app.recorder.history)


async def asked(app: ChatApp) -> None:
    await loaded(app)
    send(app, "a question")


async def answered(app: ChatApp) -> None:
    await asked(app)
    await passed(lambda: app.session.status.done and not app.session.busy)


def send(app: ChatApp, text: str) -> None:
    app.chat.composer.write(text)
    app.chat.composer.editor.action_request("send")


@pytest.mark.parametrize("rounds", MOMENTS)
def test_leaving_while_the_screen_opens_ends_well(tmp_path: Path, rounds: int) -> None:
    assert left(Stage(tmp_path), screen, rounds).code == 0


def test_leaving_while_the_model_loads_keeps_the_question(tmp_path: Path) -> None:
    stage, loads = LoadsLong(tmp_path), threading.Event()
    stage.loads = loads

    async def ask(app: ChatApp) -> None:
        await screen(app)
        await passed(lambda: app.recorder.history)
        send(app, "a question")
        await passed(lambda: app.session.busy)

    result = left(stage, ask)
    loads.set()
    assert result.code == 0
    assert [node.message.content for node in result.messages] == ["a question"]


def test_leaving_while_an_answer_streams_keeps_what_came(tmp_path: Path) -> None:
    events = (*told("the beginning").events[:-2], HOLD)
    stage = Stage(tmp_path, script=lambda request: ScriptedAnswer(events=events))

    async def stream(app: ChatApp) -> None:
        await asked(app)
        await passed(lambda: app.session.last_answer())

    result = left(stage, stream)
    assert result.code == 0
    assert [node.state for node in result.messages] == ["whole", "stopped"]
    assert result.messages[-1].message.content == "the beginning"


@pytest.mark.parametrize("rounds", MOMENTS)
def test_leaving_at_the_end_of_an_answer_keeps_it_and_does_not_send_what_waits(
    tmp_path: Path, rounds: int
) -> None:
    stage = Stage(tmp_path, script=lambda request: told("all ", "of it"))

    async def end(app: ChatApp) -> None:
        await asked(app)
        await passed(lambda: app.session.busy)
        send(app, "what waits")
        await passed(lambda: app.session.status.done)

    result = left(stage, end, rounds)
    assert result.code == 0
    assert [node.message.content for node in result.messages[:2]] == ["a question", "all of it"]
    assert result.messages[1].state == "whole"
    waited = [node.message.content for node in result.messages[2:3]] or [result.draft]
    assert waited == ["what waits"]


@pytest.mark.parametrize("rounds", MOMENTS)
def test_leaving_while_the_speed_of_an_answer_is_noted_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    monkeypatch.setattr(program, "_QUIT_WAIT_S", 80.0)  # a busy machine may need seconds
    stage, notes = NotesLate(tmp_path), threading.Event()
    stage.notes = notes

    async def end(app: ChatApp) -> None:
        await answered(app)
        asyncio.get_running_loop().call_later(0.02, notes.set)

    result = left(stage, end, rounds)
    assert result.code == 0
    assert stage.remembered
    assert result.messages[-1].state == "whole"


def test_leaving_waits_no_longer_than_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_QUIT_WAIT_S", 0.01)
    stage, notes = NotesLate(tmp_path), threading.Event()
    stage.notes = notes
    result = left(stage, answered)
    kept_waiting = not stage.remembered
    notes.set()
    assert result.code == 0
    assert kept_waiting
    assert result.messages[-1].state == "whole"


@pytest.mark.parametrize("rounds", MOMENTS)
def test_leaving_while_a_pull_runs_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    over = threading.Event()

    def pull(self: BackgroundPull, name: str) -> None:
        while not over.wait(0.0005):
            self._call(self._show_progress, f"pull {name} 1 of 2 MB")
        self._call(self.finished, name)

    monkeypatch.setattr(BackgroundPull, "_run", pull)

    async def begin(app: ChatApp) -> None:
        await loaded(app)
        app.chat.post_message(Composer.CommandEntered("/pull other"))
        await passed(lambda: app.session.status.pulling)

    result = left(Stage(tmp_path, changes={"offline": False}), begin, rounds)
    over.set()
    assert result.code == 0
