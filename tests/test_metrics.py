"""The table of figures, and the arithmetic behind them."""

from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localchat import metrics
from localchat.engine import events
from localchat.engine.stats_line import stats_line
from localchat.metrics import METRICS
from tests.support.cli_program import DONE


def test_every_figure_of_the_events_is_in_the_table() -> None:
    told = {
        name
        for kind in (events.MetricsSnapshot, events.Usage, events.Timings, events.Speculation)
        for name in get_type_hints(kind)
    }
    renamed = {"phase": "", "off": "speculation_off"}
    names = {renamed.get(name, name) for name in told if not name.startswith("__")} - {""}
    assert names <= set(METRICS)


def test_each_figure_has_one_sentence_and_its_unit_in_its_name() -> None:
    endings = {"s": "_s", "B": "_bytes", "tok/s": "_tokens_per_s"}
    for name, figure in METRICS.items():
        assert figure.name == name
        assert figure.about.endswith(".")
        assert name.endswith(endings.get(figure.unit, "")), name


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_was_measured_and_covers_its_share(values: list[float], share: float) -> None:
    found = metrics.percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_rates_need_two_tokens_and_some_time() -> None:
    assert metrics.percentile([], 0.5) is None
    assert metrics.decode_rate(11, 1.0, 2.0) == 10.0
    assert metrics.decode_rate(1, 1.0, 2.0) is None
    assert metrics.decode_rate(5, 1.0, 1.0) is None
    assert metrics.prefill_rate(100, 40, 2.0) == 30.0
    assert metrics.prefill_rate(100, 100, 2.0) is None
    assert metrics.acceptance(0, 0) is None
    assert metrics.acceptance(4, 3) == 0.75
    assert metrics.speedup(30, 1.0, 0.1) == 3.0
    assert metrics.shared_tpot_ms(0.1, 4) == [25.0] * 4


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (4.7e9, "4.7 GB"),
        (2e12, "2000.0 GB"),
    ],
)
def test_sizes_in_words(count: float, text: str) -> None:
    assert metrics.size(count) == text


def test_a_part_is_told_in_the_unit_of_the_whole() -> None:
    assert metrics.sizes(2.1e9, 4.7e9) == "2.1/4.7 GB"
    assert metrics.sizes(100, 4.7e9) == "0.0/4.7 GB"
    assert metrics.sizes(0, 0) == "0/0 B"


def test_the_line_of_stats_is_as_promised() -> None:
    assert stats_line(DONE) == "TTFT 0.41 s · 62.0 tok/s · KV 412/32768 (1%) · drafts 34/51"
