"""The table of metrics, and how they are computed."""

from pathlib import Path
from typing import get_type_hints

from hypothesis import given
from hypothesis import strategies as st

from localchat import metrics
from localchat.engine import events
from localchat.metrics import METRICS, SHOWN
from localchat.tui.screens.help import help_lines


def test_every_metric_of_the_events_is_in_the_table() -> None:
    told = {
        name
        for kind in (events.MetricsSnapshot, events.Usage, events.Timings, events.Speculation)
        for name in get_type_hints(kind)
    }
    renamed = {"phase": "", "off": "speculation_off"}
    names = {renamed.get(name, name) for name in told if not name.startswith("__")} - {""}
    assert names <= set(METRICS)


def test_each_metric_has_one_sentence_and_its_unit_in_its_name() -> None:
    endings = {"s": "_s", "B": "_bytes", "tok/s": "_tokens_per_s"}
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.about.endswith(".")
        assert name.endswith(endings.get(metric.unit, "")), name


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


def test_the_help_and_the_glossary_explain_every_metric_of_the_panel() -> None:
    help_text = {line.keys: line.about for line in help_lines({}) if line.section == "Metrics"}
    glossary = Path("docs/glossary.md").read_text(encoding="utf8")
    for metric in SHOWN:
        assert help_text[metric.label] == metric.about
        assert f"| **{metric.label}** | {metric.about} |" in glossary
