"""Metrics in plain words, and in the terms of the field one key away."""

from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot

from localchat.config.settings_file import read_settings
from localchat.engine.events import MetricsSnapshot, Prefill, Queued, Reasoning, Text
from localchat.engine.interface import MemoryParts
from localchat.metrics import METRICS
from localchat.session.blocks import AnswerBlock
from localchat.session.engine_status import EngineStatus
from localchat.tui.metric_words import MetricWords
from localchat.tui.widgets.metrics_panel import panel_rows
from localchat.tui.widgets.status_bar import status_parts
from tests.support.tui_stage import DONE, INFO, STATS, Stage, app_of, footer, play, say, told, until

PLAIN, TERMS = MetricWords(technical=False), MetricWords(technical=True)


def answered(*pieces: str) -> EngineStatus:
    status = EngineStatus(info=INFO, stats=STATS)
    status.begin()
    status.update(Prefill(6144, 6144, 6200))
    for piece in pieces:
        status.update(Text(0, piece))
    status.update(DONE)
    return status


def foot(status: EngineStatus, words: MetricWords) -> str:
    return " ".join(part.text for part in status_parts(status, words))


def panel(status: EngineStatus, words: MetricWords) -> list[str]:
    return [
        "".join(piece.text for piece in row.pieces).strip() for row in panel_rows(status, 43, words)
    ]


def test_the_foot_speaks_plainly() -> None:
    status = answered("so " * 106)
    shown = foot(status, PLAIN)
    assert "first word 0.4 s" in shown
    assert "31 words/s" in shown, "106 words in 212 tokens at 62.04 tok/s"
    assert "context 20% full" in shown
    assert "34 of 51 guesses right" in shown
    assert "on the CPU" in shown
    for term in ("TTFT", "tok/s", "KV", "drafts"):
        assert term not in shown


def test_the_terms_of_the_field_are_all_still_there() -> None:
    shown = foot(answered("so " * 106), TERMS)
    for part in ("TTFT 0.41 s", "62.0 tok/s", "KV 6,412/32,768 (20%)", "drafts 34/51"):
        assert part in shown
    assert "drafts" not in foot(EngineStatus(info=INFO, stats=STATS), TERMS), "0/0 says nothing"
    assert TERMS.drafts(1234, 5678) == "drafts 1,234/5,678"
    assert PLAIN.drafts(1234, 5678) == "1,234 of 5,678 guesses right"


def test_the_parts_of_the_memory_add_up_to_its_heading() -> None:
    parts = MemoryParts(31_000_000, 17_000_000, 16_000_000, 83_000_000)
    info = msgspec.structs.replace(
        INFO, actual=None, actual_bytes=0, predicted=parts, predicted_bytes=131_000_000
    )
    rows = panel_rows(EngineStatus(info=info), 43, PLAIN)
    assert "147 MB of" in "".join(piece.text for piece in rows[0].pieces)


def test_the_panel_has_the_same_figures_in_both_tongues() -> None:
    status = answered("so " * 106)
    plain, terms = panel_rows(status, 43, PLAIN), panel_rows(status, 43, TERMS)
    assert [row.metric for row in plain] == [row.metric for row in terms]
    text = "\n".join(panel(status, PLAIN))
    for term in ("TTFT", "TPOT", "KV", "tok/s", " tok ", "decode", "prefill", "Speculation"):
        assert term not in text
    assert "first word after" in text
    field_rows = panel(status, TERMS)
    for term in ("TTFT", "swapped to RAM", "· free"):
        assert any(line.startswith(term) for line in field_rows)


def test_a_plain_figure_is_explained_with_its_term() -> None:
    about = METRICS["ttft_s"].about
    assert PLAIN.explained("TTFT", about) == f"TTFT: {about}"
    assert TERMS.explained("TTFT", about) == about
    assert PLAIN.explained("threads", "x") == "x", "the word is the term"


def test_footers_speak_as_the_settings_say_from_the_first_answer_on(tmp_path: Path) -> None:
    stage = Stage(
        tmp_path,
        script=lambda request: told("so " * 106),
        changes={"technical_metrics": True},
    )

    async def what(pilot: Pilot[int]) -> None:
        await say(pilot, "hi")
        (footer,) = (
            block.footer
            for block in app_of(pilot).chat.transcript.blocks
            if isinstance(block, AnswerBlock)
        )
        assert footer.startswith("TTFT 0.41 s")

    play(stage, what)


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        (("one two", " three"), 3),
        (("un", "believ", "able. ", "Yes"), 2),
        (("",), 0),
        (("two\n\n", "words"), 2),
        (("東京", "は大きい"), 6),
        (("in 東", "京 now"), 4),
    ],
)
def test_words_are_counted_across_pieces(pieces: tuple[str, ...], count: int) -> None:
    status = EngineStatus()
    status.begin()
    for piece in pieces:
        status.update(Reasoning(0, piece))
    assert status.words == count
    status.begin()
    assert status.words == 0


def test_a_rate_of_words_waits_for_some_of_them() -> None:
    status = EngineStatus()
    status.begin()
    status.update(Text(0, "Yes"))
    status.update(MetricsSnapshot("decode", decode_tokens_per_s=50.0, completion_tokens=2))
    assert "words/s" not in foot(status, PLAIN)
    assert "50.0 tok/s" in foot(status, TERMS)


def test_states_speak_plainly() -> None:
    status = EngineStatus()
    status.begin()
    status.update(Queued(2))
    assert "waiting, 2 ahead" in foot(status, PLAIN)
    status.update(Prefill(1344, 0, 3278))
    assert "reading your prompt 41%" in foot(status, PLAIN)
    assert "prefill 1,344/3,278" in foot(status, TERMS)


def test_a_key_changes_the_words_and_the_settings_keep_them(tmp_path: Path) -> None:
    stage = Stage(tmp_path, script=lambda request: told("so " * 106))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "hi")
        assert "first word" in bar(pilot)
        assert below_answer(pilot) == "first word 0.4 s · 31 words/s"
        await pilot.press("ctrl+o")
        await until(pilot, lambda: "F12 terms" in footer(app))
        await pilot.press("f12")
        await until(pilot, lambda: "TTFT 0.41 s" in bar(pilot))
        assert "TTFT 0.41 s · 62.0 tok/s" in below_answer(pilot)
        assert "F12 plain words" in footer(app)
        defaults = read_settings(stage.paths.settings_file).defaults
        assert defaults["technical_metrics"] is True
        await pilot.press("f12")
        await until(pilot, lambda: "first word" in bar(pilot))
        assert read_settings(stage.paths.settings_file).defaults["technical_metrics"] is False

    def below_answer(pilot: Pilot[int]) -> str:
        block = app_of(pilot).chat.transcript.blocks[-1]
        assert isinstance(block, AnswerBlock)
        return block.footer

    def bar(pilot: Pilot[int]) -> str:
        return app_of(pilot).chat.status.render_line(0).text

    play(stage, what, 120, 40)


def test_the_settings_screen_overrides_what_the_key_said(tmp_path: Path) -> None:
    stage = Stage(tmp_path, script=lambda request: told("so " * 106))

    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await pilot.press("f12")
        await until(pilot, lambda: app.session.setup.settings.technical_metrics)
        await pilot.press("f2", *"technical")
        await pilot.press("enter", *"false", "enter", "escape")
        await until(pilot, lambda: not app.session.setup.settings.technical_metrics)

    play(stage, what, 120, 40)
