"""The list of models: verdicts by the planner, one by one, first what one looks at."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot

from localchat.chat.conversation import Conversation
from localchat.cli.chat.session_context import LoadPlanner
from localchat.cli.resolve import Setup
from localchat.config.paths import find_paths
from localchat.config.settings import Settings
from localchat.engine.request import Message
from localchat.errors import ModelInvalid
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.models.aliases import add_alias
from localchat.models.assess import Subject, assess
from localchat.models.catalog import read_catalog
from localchat.models.names import parse
from localchat.models.published_shapes import published_model
from localchat.session.context import CatalogEstimate
from localchat.tui.screens import models
from tests.support.histories import record
from tests.support.tui_stage import Stage, app_of, play, until

GB = 10**9
LAPTOP = Machine("laptop", frozenset({"avx2"}), 4, 16 * GB, 12 * GB)


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_room_bytes", lambda: 12 * GB)


def test_the_list_says_what_fit_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: LAPTOP)
    paths = find_paths(os.environ)
    setup = cast(Setup, SimpleNamespace(paths=paths, settings_for=lambda names: Settings()))
    planner = LoadPlanner(setup)
    drawn = published_model(parse("qwen2.5:7b", read_catalog(paths)))
    assert drawn is not None
    plan = assess(
        Subject(drawn.name, drawn),
        LoadOptions(max_slots=2, context_tokens=4096),
        LAPTOP,
        None,
        speed=False,
    ).plan
    found = planner.estimate("qwen2.5:7b")
    assert found is not None
    assert (found.plan, found.file_bytes) == (plan, drawn.file_bytes)
    assert planner.estimate("nomic-embed-text:v1.5") is None


def test_what_is_marked_is_weighed_first_and_the_list_is_there_before(tmp_path: Path) -> None:
    asked: list[str] = []
    go = threading.Event()

    class Slow(Stage):
        def estimate(self, name: str) -> CatalogEstimate | None:
            asked.append(name)
            assert go.wait(60)
            if name == "qwen3:8b":
                raise ModelInvalid("it cannot be run here")
            return super().estimate(name)

    async def what(pilot: Pilot[int]) -> None:
        await pilot.press("f3")
        screen: Any = pilot.app.screen
        await until(pilot, lambda: asked)
        headings = [str(one.prompt) for one in screen.entries.options if one.disabled]
        assert "To download" in headings, "nothing is promised before it is weighed"
        # One is under way; the keys work meanwhile, and the mark decides which is next.
        await pilot.press(*"qwen3:8b")
        await until(pilot, lambda: screen.marked == "qwen3:8b")
        go.set()
        await until(pilot, lambda: len(asked) > 2)
        assert asked[1] == "qwen3:8b"
        await until(pilot, lambda: screen.verdicts_complete)
        words = {name: judged.words for name, judged in screen._verdicts.items()}
        assert words["qwen3:8b"] == "it cannot be run here"
        assert words["qwen2.5:7b"].startswith("fits: ")
        assert words["qwen2.5:7b"].endswith(" with 32,768 tokens")
        # No shape is known of this one: by its parameters alone.
        assert words["llama3.1:8b"].startswith("fits, about ")

    play(Slow(tmp_path), what)


def test_models_stand_in_sections_and_too_large_ones_below(tmp_path: Path) -> None:
    class Judge(Stage):
        def estimate(self, name: str) -> CatalogEstimate | None:
            found = super().estimate(name)
            if found is None or name != "qwen2.5:72b":
                return found
            return found._replace(plan=replace(found.plan, fits=False))

    async def what(pilot: Pilot[int]) -> None:
        await pilot.press("f3")
        screen: Any = pilot.app.screen
        await until(pilot, lambda: screen.verdicts_complete)
        options = screen.entries.options
        sections: dict[str, list[str]] = {}
        for option in options:
            if option.disabled:
                names = sections.setdefault(str(option.prompt), [])
            else:
                names.append(option.id)
        assert list(sections) == [
            "On this computer",
            "To download: they fit this computer",
            "Too large for this computer",
        ]
        assert "qwen2.5:7b" in sections["To download: they fit this computer"]
        assert "qwen2.5:72b" in sections["Too large for this computer"]
        marks = []
        for _ in range(3):
            marks.append(screen.marked)
            await pilot.press("down")
        assert None not in marks, "headings are passed over"
        await pilot.press(*"zzzzzz")
        assert "no model matches zzzzzz" in str(screen.entries.options[0].prompt)
        await pilot.press("enter")
        assert pilot.app.screen is screen

    play(Judge(tmp_path, models=("guide",)), what)


def test_the_path_of_a_file_is_taken_although_no_model_of_the_list_matches(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, models=("guide", "/models/new.gguf"))

    async def what(pilot: Pilot[int]) -> None:
        await pilot.press("f3")
        screen: Any = pilot.app.screen
        await until(pilot, lambda: screen.verdicts_complete)
        screen.filter_input.value = "/models/new.gguf"
        await until(pilot, lambda: "Enter uses" in str(screen.entries.options[0].prompt))
        await pilot.press("enter")
        app = app_of(pilot)
        await until(pilot, lambda: app.session.setup.model.word == "/models/new.gguf")

    play(stage, what)


def test_the_whole_verdict_of_the_marked_model_is_below_the_list(tmp_path: Path) -> None:
    class Judge(Stage):
        def estimate(self, name: str) -> CatalogEstimate | None:
            found = super().estimate(name)
            if found is None or name != "qwen2.5:7b":
                return found
            plan = replace(found.plan, fits=False, context_tokens=8192, weights_bytes=48 * 10**9)
            return found._replace(plan=plan)

    async def what(pilot: Pilot[int]) -> None:
        await pilot.press("f3")
        screen: Any = pilot.app.screen
        await until(pilot, lambda: screen.verdicts_complete)
        assert screen._line(screen._models["qwen2.5:7b"]).plain.endswith("  no room")
        assert "does not fit: 50.1 GB with 8,192 tokens" in screen.about("qwen2.5:7b")

    play(Judge(tmp_path, models=("guide",)), what)


def test_leaving_the_list_ends_the_weighing(tmp_path: Path) -> None:
    asked: list[str] = []

    class Counting(Stage):
        def estimate(self, name: str) -> CatalogEstimate | None:
            asked.append(name)
            return super().estimate(name)

    async def what(pilot: Pilot[int]) -> None:
        await pilot.press("f3")
        await until(pilot, lambda: asked)
        await pilot.press("escape")
        await pilot.pause(0.1)
        seen = len(asked)
        await pilot.pause(0.1)
        assert len(asked) <= seen + 1

    play(Counting(tmp_path), what)


@pytest.mark.parametrize("width", [40, 60, 79, 80, 99, 100, 120])
def test_a_long_name_is_whole_and_its_verdict_beside_it(tmp_path: Path, width: int) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await pilot.press("f3")
        screen: Any = pilot.app.screen
        await until(pilot, lambda: screen.verdicts_complete)
        entry = screen._models["qwen3-coder-next:80b-a3b"]
        line = screen._line(entry).plain
        assert f" {entry.name} " in line
        assert cell_len(line.rstrip()) <= screen.entries.scrollable_content_region.width
        assert ("GB" in line) == (width >= 70)

    play(Stage(tmp_path), what, width=width)


def test_a_model_that_was_used_by_its_path_is_listed_and_the_one_in_use_is_named(
    tmp_path: Path,
) -> None:
    earlier = tmp_path / "earlier.gguf"
    earlier.write_bytes(b"x" * 2_000)

    async def steps(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        assert app.recorder.history is not None
        old = Conversation(model=str(earlier))
        record(app.recorder.history, old, [old.add(Message("user", "hi"), parent=None)])
        gone = Conversation(model=str(tmp_path / "gone.gguf"))
        record(app.recorder.history, gone, [gone.add(Message("user", "hi"), parent=None)])
        await pilot.press("f3")
        screen: Any = pilot.app.screen
        await until(pilot, lambda: screen._models)
        await until(
            pilot, lambda: any(option.id == str(earlier) for option in screen.entries.options)
        )
        rows = {option.id: str(option.prompt) for option in screen.entries.options}
        assert "earlier.gguf" in rows[str(earlier)]
        assert not any("gone" in row for row in rows.values())
        assert not any("in use" in row for id_, row in rows.items() if id_ == "guide")

    play(Stage(tmp_path), steps)


def test_the_model_in_use_is_marked_in_words(tmp_path: Path) -> None:
    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("f3")
        screen: Any = pilot.app.screen
        await until(pilot, lambda: screen._models)
        rows = {option.id: str(option.prompt) for option in screen.entries.options}
        assert rows["guide"].startswith("● ") and "in use" in rows["guide"]
        assert sum("in use" in row for row in rows.values()) == 1

    play(Stage(tmp_path, models=("guide",)), steps)


def test_the_mark_begins_at_the_model_in_use(tmp_path: Path) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"x" * 2_000)
    stage = Stage(tmp_path, models=("mine", "guide"))
    add_alias(stage.paths, "mine", str(file))

    async def steps(pilot: Pilot[int]) -> None:
        await pilot.press("f3")
        screen: Any = pilot.app.screen
        await until(pilot, lambda: screen.verdicts_complete)
        assert screen.marked == "mine"
        await pilot.press("m", "backspace")
        assert screen.marked == "mine", "a filter that is empty again is no filter"

    play(stage, steps)


def test_a_model_that_was_imported_as_a_hard_link_is_listed_once(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
    paths = find_paths(environ)
    imported = paths.models_dir / "linked-Q8_0.gguf"
    imported.parent.mkdir(parents=True)
    original = tmp_path / "original.gguf"
    original.write_bytes(b"GGUF" + bytes(2_000))
    os.link(original, imported)
    context: Any = SimpleNamespace(paths=paths, environ=environ)
    names = [entry.name for entry in models._entries(context, (str(original), "original"))]
    assert "linked-Q8_0" in names
    assert str(original) not in names
