"""Offers can be taken by the key beside them, which the foot of the screen shows too."""

from pathlib import Path

import pytest
from textual.pilot import Pilot

from localchat.engine.events import MetricsSnapshot, Text
from localchat.errors import DoesNotFit
from localchat.fit.steps import MemoryStep
from localchat.session.blocks import NoticeBlock, Offer
from localchat.session.engine_status import EngineStatus
from localchat.tui.screens.models import ModelScreen
from localchat.tui.widgets.status_bar import fit_parts, fit_with_hint, status_parts
from localchat.tui.widgets.welcome import Welcome
from tests.support.tui_stage import Stage, app_of, footer, play, say, until


def test_another_model_is_chosen_where_it_is_offered(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await until(pilot, lambda: app.chat.transcript.blocks)
        (notice,) = app.chat.transcript.blocks
        assert isinstance(notice, NoticeBlock)
        assert [each.label for each in notice.offers] == [
            "choose another model",
            "continue with the built-in guide",
        ]
        await pilot.press("alt+1")
        await until(pilot, lambda: isinstance(app.screen, ModelScreen))

    play(Stage(tmp_path, refuse=DoesNotFit("it does not fit")), what)


def test_the_guide_stands_in_for_a_model_that_cannot_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path, models=("broken", "guide"), refuse=DoesNotFit("it does not fit"))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await until(pilot, lambda: app.chat.transcript.blocks)
        stage.refuse = None
        await pilot.press("alt+2")
        await until(pilot, lambda: app.session.status.info is not None)
        assert app.session.setup.model.name == "guide"

    play(stage, what)


STEPS = (
    MemoryStep(
        "kv_type",
        "KV cache in q8_0 rather than f16",
        600_000_000,
        suffices=True,
        settings=(("kv_cache_type", "q8_0"),),
    ),
    MemoryStep("model", "other, which is here", suffices=True, flag="-m other", model="other"),
)


def test_a_load_that_does_not_fit_offers_the_steps_and_takes_one(tmp_path: Path) -> None:
    refuse = DoesNotFit("it does not fit", needed_bytes=9, free_bytes=6)
    stage = Stage(tmp_path, refuse=refuse, memory_steps=STEPS)

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await until(pilot, lambda: app.chat.transcript.blocks)
        (notice,) = app.chat.transcript.blocks
        assert isinstance(notice, NoticeBlock)
        assert [offer.label for offer in notice.offers] == [
            "KV type: KV cache in q8_0 rather than f16; frees 600 MB, which is enough",
            "choose another model",
            "continue with the built-in guide",
        ]
        stage.refuse = None
        await pilot.press("alt+1")
        await until(pilot, lambda: app.session.status.info is not None)
        assert stage.opened[-1][0].load.kv_type == "q8_0"

    play(stage, what)


def test_a_key_means_one_offer(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        welcome = app.chat.query_one(Welcome)
        await until(pilot, lambda: "Alt+1" in str(welcome.render()))
        app.session.notice("other is here.", "info", (Offer("chat with other", "model other"),))
        (notice,) = app.chat.transcript.blocks
        assert isinstance(notice, NoticeBlock)
        key = notice.offers[0].key
        assert key not in str(welcome.render()), "the keys of the welcome stay what they are"
        assert f"{key} chat with other" in footer(app)
        await pilot.press(key.lower())
        await until(pilot, lambda: app.session.setup.model.name == "other")

    play(Stage(tmp_path, models=("guide", "other")), what)


def test_a_new_offer_takes_the_key_of_those_before_it(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        session = app_of(pilot).session
        await say(pilot, "hi")
        other = Offer("chat with other", "model other")
        again = Offer("resume download", "pull tiny")
        for offers in ((other,), (again,), (again,)):
            session.notice("a notice", "info", offers)
        found = [
            each for each in app_of(pilot).chat.transcript.blocks if isinstance(each, NoticeBlock)
        ]
        assert [[(one.label, one.key) for one in each.offers] for each in found] == [
            [("chat with other", "▸")],
            [],
            [("resume download", "Alt+1")],
        ]

    play(Stage(tmp_path), what)


@pytest.mark.parametrize("width", [52, 58, 60])
def test_how_to_stop_comes_before_ornaments(width: int) -> None:
    live = EngineStatus()
    live.begin()
    live.update(Text(0, "so"))
    for rate in range(190, 210):
        live.update(MetricsSnapshot("decode", ttft_s=0.41, decode_tokens_per_s=float(rate)))
    parts = status_parts(live)
    shown = fit_with_hint("Esc stops", parts, width)
    assert {"TTFT 0.41 s", "209.0 tok/s"} <= {part.text for part in shown}
    assert len(fit_parts(shown, width - len("Esc stops"))) == len(shown)
    assert len(shown) < len(parts)
    assert fit_with_hint("x" * width, parts, width) == fit_parts(parts, width), (
        "figures come before a hint"
    )


def test_a_narrow_greeting_keeps_its_sentences_whole(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await pilot.resize_terminal(40, 30)
        await pilot.pause()
        shown = str(app_of(pilot).chat.query_one(Welcome).render())
        assert "choose a model for anything else." in " ".join(shown.split())

    play(Stage(tmp_path, models=("guide", "other")), what)
