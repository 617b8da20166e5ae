"""The metrics panel and the status bar: their terms, and the place of the panel on the screen."""

from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot

from localchat.engine.events import MetricsSnapshot, Prefill, Queued, Text
from localchat.engine.interface import GpuPart, MemoryParts
from localchat.session.blocks import AnswerBlock, NoticeBlock
from localchat.session.engine_status import EngineStatus
from localchat.tui.widgets.metrics_panel import columns_of, panel_sections
from localchat.tui.widgets.status_bar import status_parts
from tests.support.tui_stage import DONE, INFO, STATS, Stage, app_of, footer, play, say, told, until


def answered() -> EngineStatus:
    status = EngineStatus(info=INFO, stats=STATS)
    status.begin()
    status.update(Prefill(6144, 6144, 6200))
    status.update(Text(0, "so"))
    status.update(DONE)
    return status


def status_text(status: EngineStatus) -> str:
    return " ".join(part.text for part in status_parts(status))


def panel_lines(status: EngineStatus) -> list[str]:
    rows = (row for section in panel_sections(status, 43) for row in section)
    return ["".join(text for text, _ in row).strip() for row in rows]


def test_the_status_bar_uses_the_terms_of_the_field() -> None:
    text = status_text(answered())
    for part in ("TTFT 0.41 s", "62.0 tok/s", "KV 6,412/32,768 (20%)", "drafts 34/51"):
        assert part in text
    assert "llamacpp · CPU" in text
    assert "drafts" not in status_text(EngineStatus(info=INFO, stats=STATS)), "0/0 says nothing"


def test_the_status_bar_shows_queue_and_prefill() -> None:
    status = EngineStatus()
    status.begin()
    status.update(Queued(2))
    assert "queued, 2 ahead" in status_text(status)
    status.update(Prefill(1344, 0, 3278))
    assert "prefill 1,344/3,278" in status_text(status)


def test_the_status_bar_shows_the_kv_of_the_last_answer_until_the_next_has_figures() -> None:
    status = answered()
    status.begin()
    status.update(Prefill(0, 0, 6800))
    assert "KV 6,412/32,768" in status_text(status)
    status.update(MetricsSnapshot("prefill", kv_used_tokens=6600, kv_total_tokens=32_768))
    assert "KV 6,600/32,768" in status_text(status)
    status.forget_answer()
    status.begin()
    assert "KV 0/" in status_text(status)


def test_the_panel_shows_the_terms_of_the_metrics_table() -> None:
    lines = panel_lines(answered())
    for term in (
        "TTFT",
        "decode",
        "TPOT p50",
        "KV cache",
        "used",
        "swapped to RAM",
        "accepted",
        "· free",
    ):
        assert any(line.startswith(term) for line in lines), term


def test_the_parts_of_the_memory_add_up_to_its_heading() -> None:
    parts = MemoryParts(31_000_000, 17_000_000, 16_000_000, 83_000_000)
    info = msgspec.structs.replace(
        INFO, actual=None, actual_bytes=0, predicted=parts, predicted_bytes=131_000_000
    )
    assert "147 MB of" in panel_lines(EngineStatus(info=info))[0]


def test_each_gpu_has_its_line() -> None:
    parts = (GpuPart(15, 5_100_000_000, 24_000_000_000), GpuPart(14, 4_800_000_000))
    status = EngineStatus(info=msgspec.structs.replace(INFO, gpu_layers=28, gpu_parts=parts))
    lines = [" ".join(line.split()) for line in panel_lines(status)]
    assert "GPU 0 15 layers, 5.1 GB of 24.0 GB" in lines
    assert "GPU 1 14 layers, 4.8 GB" in lines
    assert "2 GPUs 28/29" in status.placement


def test_an_answer_has_its_metrics_below_it(tmp_path: Path) -> None:
    async def what(pilot: Pilot[int]) -> None:
        await say(pilot, "hi")
        blocks = app_of(pilot).chat.transcript.blocks
        (answer,) = (block for block in blocks if isinstance(block, AnswerBlock))
        assert answer.footer == "TTFT 0.41 s · 62.0 tok/s"

    play(Stage(tmp_path, script=lambda request: told("so " * 106)), what)


def test_removed_keys_of_the_settings_file_are_reported(tmp_path: Path) -> None:
    notices = ("technical_metrics was removed",)

    async def what(pilot: Pilot[int]) -> None:
        blocks = app_of(pilot).chat.transcript.blocks
        await until(pilot, lambda: any(isinstance(block, NoticeBlock) for block in blocks))
        texts = [block.text for block in blocks if isinstance(block, NoticeBlock)]
        assert texts == list(notices)

    play(Stage(tmp_path, notices=notices), what)


def test_two_columns_have_all_sections_whole_and_in_order() -> None:
    sections = panel_sections(answered(), 43)
    left, right = columns_of(sections, 2)
    assert abs(len(left) - len(right)) <= max(map(len, sections))
    rows = [row for row in (*left, *right) if row]
    assert rows == [row for section in sections for row in section]
    assert right[0] in [section[0] for section in sections]


@pytest.mark.parametrize(
    ("width", "height", "beside", "below"),
    [(120, 40, True, False), (110, 18, True, False), (80, 24, False, True), (76, 20, False, True)],
)
def test_metrics_and_conversation_share_the_screen(
    tmp_path: Path, width: int, height: int, beside: bool, below: bool
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "hi")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.chat.panel.region.area)
        talk, panel = app.chat.query_one("#talk").region, app.chat.panel.region
        assert talk.intersection(panel).area == 0
        assert (panel.x == talk.right, panel.y == talk.bottom) == (beside, below)
        assert talk.height >= 8
        assert talk.width >= 60
        await pilot.press("escape")
        assert app.chat.panel.display

    play(Stage(tmp_path), what, width, height)


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 18), (40, 12)])
def test_metrics_without_room_take_the_place_of_the_conversation(
    tmp_path: Path, width: int, height: int
) -> None:
    async def what(pilot: Pilot[int]) -> None:
        app = app_of(pilot)
        await say(pilot, "hi")
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.chat.panel.region.area)
        assert app.chat.panel.region == app.chat.query_one("#body").region
        assert "Esc close" in (footer(app) if height > 15 else app.chat.status.hint)
        await pilot.press("tab")
        assert app.chat.panel.has_focus
        await pilot.press("escape")
        assert not app.chat.panel.display
        assert app.chat.composer.editor.has_focus

    play(Stage(tmp_path), what, width, height)
