"""What the program says is seen: results of commands, keys of offers, progress, and nothing that is over."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.pilot import Pilot

from localchat.chat.conversation import Question
from localchat.engine.events import Accepted, Loading, MetricsSnapshot, Prefill
from localchat.errors import EngineDied, NetworkError
from localchat.session.blocks import NoticeBlock
from localchat.session.engine_status import EngineStatus
from localchat.session.prefill_time import PrefillSample
from localchat.session.progress import time_left
from localchat.tui.progress import PROGRESS_ID, progress_block
from localchat.tui.screens.confirm import ConfirmScreen
from localchat.tui.screens.models import ModelScreen
from localchat.tui.widgets.charts import sparkline
from localchat.tui.widgets.composer import Composer
from localchat.tui.widgets.metrics_panel import panel_sections
from localchat.tui.widgets.status_bar import status_parts
from localchat.tui.widgets.welcome import Welcome
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tui_scenes import FIRST
from tests.support.tui_stage import (
    DONE,
    HOLD,
    STATS,
    Stage,
    app_of,
    footer,
    play,
    say,
    sent,
    told,
    until,
    visible,
)

LONG = "\n\n".join(f"Line {n} of an answer." for n in range(200))


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("/export notes.md", "Written to"),
        ("/fit tiny", "weights"),
        ("/fit nothing", "no model 'nothing'"),
        ("/bogus", "there is no command /bogus"),
        ("/copy many", "expected a number of messages"),
        ("/system", "There are no instructions"),
        ("/pull tiny", "cannot be downloaded"),
        ("/set top_k", "needs a value"),
        ("/set top_k many", "many"),
        ("/regen now", "Line 199"),
    ],
)
def test_the_result_of_a_command_is_seen_by_a_reader_who_scrolled_up(
    line: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "tell me")
        await pilot.press("pageup", "pageup")
        assert not app.chat.transcript.following
        app.chat.composer.write(line)
        await pilot.press("enter")
        await until(pilot, lambda: shown in visible(app), 20.0)

    play(Stage(tmp_path, script=lambda request: told(LONG), changes={"offline": True}), what)


def test_a_pull_is_seen_at_once_and_how_it_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "localchat.tui.background_pull.BackgroundPull._run", lambda self, name: None
    )

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "tell me")
        await pilot.press("pageup", "pageup")
        app.chat.composer.write("/pull tiny")
        await pilot.press("enter")
        await until(pilot, lambda: app.session.status.pulling == "pull tiny")
        app.chat.pulls.failed("tiny", NetworkError("the hub cannot be reached"))
        await until(pilot, lambda: "the hub cannot be reached" in visible(app))

    play(Stage(tmp_path, script=lambda request: told(LONG)), what)


def test_a_message_that_is_held_back_says_why_where_it_is_seen(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "tell me")
        await pilot.press("pageup", "pageup")
        app.chat.composer.write("sum up @nothing.txt")
        await pilot.press("enter")
        await until(pilot, lambda: "there is no file nothing.txt" in visible(app))

    play(Stage(tmp_path, script=lambda request: told(LONG)), what)


def test_a_panel_in_the_place_of_the_conversation_makes_room_for_a_result(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "tell me")
        await pilot.press("ctrl+o")
        assert app.chat.is_covered
        app.chat.composer.write("/bogus")
        await pilot.press("enter")
        await until(pilot, lambda: "no command /bogus" in visible(app), 20.0)
        assert not app.chat.is_covered

    play(Stage(tmp_path), what, 60, 20)


def test_a_notice_out_of_sight_is_told_above_the_composer(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "tell me")
        await pilot.press("pageup", "pageup")
        app.session.notice("tiny is here.")
        assert "tiny is here." in str(app.chat.query_one("#banner").render())
        assert not app.chat.transcript.following, "a reader is left in peace"

    play(Stage(tmp_path, script=lambda request: told(LONG)), what)


def test_the_keys_of_the_first_screen_stay_when_the_models_come(tmp_path: Path) -> None:
    stage = Stage(tmp_path, models=("guide",))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        welcome = app.chat.query_one(Welcome)
        await until(pilot, lambda: "Alt+3" in str(welcome.render()))
        before = dict(welcome.offers)
        stage.first_run = FIRST
        await app._greet()
        assert {n: welcome.offers[n] for n in before} == before
        assert "Alt+4  qwen2.5:0.5b · quick answers" in str(welcome.render())
        assert "F3     choose a model" in str(welcome.render())

    play(stage, what)


def test_the_first_screen_says_that_it_looks_for_models(tmp_path: Path) -> None:
    stage = Stage(tmp_path, models=("guide",))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        welcome = app.chat.query_one(Welcome)
        await until(pilot, lambda: "Alt+3" in str(welcome.render()))
        found = threading.Event()
        search = lambda: FIRST if found.wait(60) else None  # noqa: E731
        app._session_context = msgspec.structs.replace(app._session_context, first_run=search)
        greeting = asyncio.create_task(app._greet())
        await until(pilot, lambda: "Looking for models that fit" in str(welcome.render()))
        found.set()
        await greeting
        assert "Looking for" not in str(welcome.render())
        assert "Models that fit this computer" in str(welcome.render())

    play(stage, what)


def test_a_download_is_asked_for_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    pull = "localchat.tui.background_pull.BackgroundPull.begin"
    monkeypatch.setattr(pull, lambda self, name, *, offline: begun.append(name))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await until(pilot, lambda: len(app.chat.query_one(Welcome).offers) == 6)
        await pilot.press("alt+4")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert "398 MB" in str(app.screen.query_one("#question").render())
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is app.chat)
        assert begun == []
        await pilot.press("alt+4")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("enter")
        await until(pilot, lambda: begun == ["qwen2.5:0.5b"])
        await pilot.press("f3")
        await until(pilot, lambda: isinstance(app.screen, ModelScreen))
        await until(pilot, lambda: app.screen.query_one("#entries").option_count)  # type: ignore[attr-defined]
        await pilot.press(*"qwen3", "enter")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("down", "enter")
        await until(pilot, lambda: app.screen is app.chat)
        assert len(begun) == 1

    play(Stage(tmp_path, models=("guide",), first_run=FIRST), what)


def test_a_failed_first_download_leaves_the_models_where_they_are(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        welcome = app.chat.query_one(Welcome)
        await until(pilot, lambda: len(welcome.offers) == 6)
        problem = NetworkError("the hub cannot be reached")
        app.chat.pulls.failed("qwen2.5:0.5b", problem)
        await until(pilot, lambda: app.chat.transcript.display)
        # The screen is drawn again some frames later, which a busy machine delays.
        await until(pilot, lambda: "Alt+4  qwen2.5:0.5b" in str(welcome.render()))
        await until(pilot, lambda: "Alt+8  resume download" in visible(app))
        await until(pilot, lambda: "Alt+8 resume download" in footer(app))

    play(Stage(tmp_path, models=("guide",), first_run=FIRST), what, 80, 40)


def test_a_sample_question_is_asked_by_its_key(tmp_path: Path) -> None:
    stage = Stage(tmp_path, models=("guide",))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await until(pilot, lambda: app.chat.query_one(Welcome).offers)
        asked = app.chat.query_one(Welcome).offers[2].removeprefix("ask ")
        await pilot.press("alt+2")
        await until(pilot, lambda: app.session.last_answer() and not app.session.busy)
        assert sent(stage.engine.requests[0]) == [("user", asked)]

    play(stage, what)


# ---------------------------------------------------------------------------- progress


def reading(done: int, at_s: float, *, cached: int = 0) -> EngineStatus:
    """A status that has read `done` of 3,278 tokens `at_s` seconds after it was accepted."""
    status = EngineStatus()
    status.begin()
    status.update(Accepted(3278, 100, 7))
    status.update(Prefill(done, cached, 3278))
    status.prefill_event_s = status.prefill_started_s + at_s
    status.prefill_samples[-1] = PrefillSample(done, at_s)
    return status


def test_progress_of_a_prompt_has_a_share_a_rate_and_the_time_left() -> None:
    status = reading(1344, 64.0)
    block = progress_block(status, status.prefill_event_s)
    assert block is not None
    assert block.text == "prefill 1,344/3,278 (41%), 21.0\u00a0tok/s, about 1 min 30 s left"
    assert block.share == pytest.approx(0.41, abs=0.001)
    later = progress_block(status, status.prefill_event_s + 60.0)
    assert later is not None
    assert later.text.endswith("about 30 s left"), "it counts down between two events"


def test_a_prompt_that_is_read_is_not_being_read_though_no_word_came() -> None:
    status = reading(3000, 64.0)
    status.update(MetricsSnapshot("prefill", kv_used_tokens=3000))
    assert progress_block(status, status.prefill_event_s) is not None
    status.update(MetricsSnapshot("decode", completion_tokens=5))
    assert progress_block(status, status.prefill_event_s) is None
    assert status.label == "writing"


def test_tokens_from_the_cache_are_no_part_of_the_rate() -> None:
    status = reading(1200, 10.0, cached=1000)
    assert status.prefill_tokens_per_s == pytest.approx(20.0)
    assert time_left(reading(3278, 10.0), 0.0) == ""


def test_panel_and_foot_show_the_progress_of_a_prompt() -> None:
    status = reading(1344, 64.0)
    foot = " ".join(part.text for part in status_parts(status))
    assert "prefill 1,344/3,278" in foot
    assert "21.0 tok/s" in foot
    rows = [
        "".join(text for text, _ in row)
        for section in panel_sections(status, 40)
        for row in section
    ]
    assert any("prefill" in row and "21.0 tok/s" in row for row in rows)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Prefill(1344, 0, 3278), "prefill 1,344/3,278 (41%)"),
        (Loading(0, 4_700_000_000), "loading the model, 4.7 GB"),
        (Loading(2_100_000_000, 4_700_000_000), "loading the model, 45%, 2.1/4.7 GB"),
        (Loading(4_700_000_000, 4_700_000_000), "warming up the model"),
    ],
)
def test_what_a_request_waits_for_is_in_the_transcript_until_its_first_words(
    event: Any, words: str, tmp_path: Path
) -> None:
    answers = iter((ScriptedAnswer(events=(event, HOLD)), told("Here it is.")))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        app.chat.composer.write("go")
        await pilot.press("enter")
        await until(pilot, lambda: words in visible(app), 20.0)
        await pilot.press("escape")
        await until(pilot, lambda: not app.session.busy)
        assert app.chat.transcript.block(PROGRESS_ID) is None
        await pilot.press("alt+1")
        await until(pilot, lambda: "Here it is." in visible(app), 20.0)

    play(Stage(tmp_path, script=lambda request: next(answers)), what)


def test_foot_and_panel_agree_on_the_kv_cache() -> None:
    status = EngineStatus()
    status.done, status.stats = DONE, STATS
    status.state = "ready"
    foot = next(part.text for part in status_parts(status) if part.text.startswith("KV"))
    rows = [
        "".join(text for text, _ in row)
        for section in panel_sections(status, 40)
        for row in section
    ]
    (heading,) = (row for row in rows if row.startswith("KV cache"))
    assert heading.split()[-2:] == foot.split()[-2:] == ["6,412/32,768", "(20%)"]


def test_a_steady_rate_does_not_look_like_a_full_bar() -> None:
    assert set(sparkline([50.0] * 12, 12)) == {"▅"}


# ---------------------------------------------------------------------------- errors and offers


def test_an_error_goes_once_its_answer_is_completed(tmp_path: Path) -> None:
    died = EngineDied("the engine died")

    def script(request: Any) -> ScriptedAnswer:
        return (
            told(" and the end")
            if request.prompt.continue_last
            else ScriptedAnswer(("begun",), error=died)
        )

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "go")
        await until(pilot, lambda: "Alt+1 try again" in footer(app))
        assert "Alt+1  try again" in visible(app)
        await pilot.press("f7")
        await until(pilot, lambda: "and the end" in visible(app), 20.0)
        assert not any(isinstance(block, NoticeBlock) for block in app.chat.transcript.blocks)
        assert "try again" not in footer(app)

    play(Stage(tmp_path, script=script), what)


def test_another_question_closes_the_offer_to_try_again(tmp_path: Path) -> None:
    died = EngineDied("the engine died")
    answers = iter((ScriptedAnswer((), error=died), told("yes")))
    stage = Stage(tmp_path, script=lambda request: next(answers))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "one")
        await say(pilot, "two")
        await pilot.press("alt+1")
        assert str(app.chat.query_one("#banner").render()) == "there is no such offer"
        assert not app.session.busy

    play(stage, what)


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_long_answer_that_nobody_looks_at_rings(
    looked_at: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[str] = []
    monkeypatch.setattr("localchat.tui.screens.chat._MIN_ALERT_S", -1.0)
    monkeypatch.setattr("localchat.tui.screens.chat.alert", lambda app, text: rung.append(text))

    async def what(pilot: Pilot[int]) -> None:
        app_of(pilot).app_focus = looked_at
        app_of(pilot).chat.on_composer_sent(Composer.Sent(Question("go")))
        await until(pilot, lambda: app_of(pilot).session.last_answer())
        await until(pilot, lambda: not app_of(pilot).session.busy)
        assert rung == ([] if looked_at else ["localchat is done"])

    play(Stage(tmp_path), what)


def test_f9_copies_what_the_mouse_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    monkeypatch.setattr("localchat.tui.clipboard.send", lambda text, *rest: copied.append(text))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "go")
        top = app.chat.transcript.region.y
        await pilot.mouse_down(offset=(2, top + 3))
        await pilot.hover(offset=(6, top + 3))
        await pilot.mouse_up(offset=(6, top + 3))
        await pilot.press("f9")
        await until(pilot, lambda: copied, 20.0)
        assert copied[0] in "alpha beta"
        assert copied[0] != "alpha beta"
        await pilot.press("f9")
        await until(pilot, lambda: len(copied) == 2, 20.0)
        assert copied[1] == "alpha beta"

    play(Stage(tmp_path, script=lambda request: told("alpha beta")), what)
