"""Records of benchmarks: numbers, damaged files, tables, comparison and charts."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest

from localchat.errors import UsageError
from localchat.measure.bench_chart import svg
from localchat.measure.bench_record import BenchStore
from localchat.measure.bench_report import (
    bars,
    comparison_sentences,
    comparison_table,
    differences_table,
    sentences,
    server_table,
    times_table,
)
from localchat.measure.energy import EnergyMeter
from localchat.measure.server_metrics import WatchedCounters, parse_counters
from localchat.measure.sweep import series
from localchat.measure.variants import parse_vary, variants
from tests.support.bench_samples import point, record


def test_records_are_numbered_and_found_again(tmp_path: Path) -> None:
    store = BenchStore(tmp_path)
    first, second = store.keep(record(point(10))), store.keep(record(point(20)))
    assert (first.id, second.id) == (1, 2)
    assert store.find("1") == first
    assert store.find("last") == second
    assert list(store.records()) == [first, second]
    file = tmp_path / "copy.json"
    file.write_bytes(msgspec.json.encode(second))
    assert store.find(str(file)) == second


def test_a_damaged_record_is_named_and_hides_no_other(tmp_path: Path) -> None:
    store = BenchStore(tmp_path)
    store.keep(record(point(10)))
    (tmp_path / "benchmarks" / "0002.json").write_text("{")
    assert [one.id for one in store.records()] == [1]
    with pytest.raises(UsageError, match="is no record of a benchmark"):
        store.find("2")


@pytest.mark.parametrize(("count", "hint"), [(0, "none yet"), (2, "1 to 2")])
def test_an_unknown_number_is_refused_with_those_that_are_there(
    tmp_path: Path, count: int, hint: str
) -> None:
    store = BenchStore(tmp_path)
    for _ in range(count):
        store.keep(record(point(10)))
    with pytest.raises(UsageError) as caught:
        store.find("7")
    assert hint in caught.value.hint


def test_a_table_shows_only_what_was_told() -> None:
    (line,) = series([point(100, 1), point(190, 2)])
    head, rows = times_table(line)
    assert rows[0][0] == "1" and rows[0][2] == "100" and rows[1][0] == "2"
    assert rows[0][head.index("TTFT ms")] == "40.0/60.0/80.0"
    assert server_table(line) is None
    told = msgspec.structs.replace(line[0].figures, preemptions=3, good_share=0.5)
    found = server_table([msgspec.structs.replace(line[0], figures=told)])
    assert found == (["CLIENTS", "GOOD", "PREEMPTED"], [("1", "50%", "3")])


def test_the_saturation_is_named() -> None:
    line = [point(100, 1), point(190, 2), point(192, 4)]
    (said,) = sentences(record(*line), line)
    assert said.startswith("Saturated from 2 clients on: 192.0 tok/s")
    rising = [point(100, 1), point(190, 2)]
    assert "--max-clients 8" in next(sentences(record(*rising), rising))


def test_answers_that_end_early_are_pointed_out() -> None:
    figures = msgspec.structs.replace(point(100).figures, completion_tokens=30.0)
    line = [msgspec.structs.replace(point(100), figures=figures)]
    assert "30 of 200 tokens" in next(sentences(record(*line), line))


def test_variants_are_set_beside_the_first() -> None:
    points = [
        point(rate, variant=name, round_=at)
        for name, values in (("a", (100, 90, 110)), ("b", (150, 135, 164)), ("c", (101, 89, 111)))
        for at, rate in enumerate(values)
    ]
    found = differences_table(record(*points, variants=("a", "b", "c"), rounds=3))
    assert found is not None
    _, (b, c) = found
    assert b[0] == "b" and b[-2].startswith("+49.7%") and b[-1] == "more than noise"
    assert c[-1] == "within noise"
    assert differences_table(record(point(1))) is None


def test_two_records_are_compared_at_the_places_of_both() -> None:
    one, other = record(point(100, 1), point(190, 2)), record(point(110, 1), point(200, 4))
    _, rows = comparison_table(one, other)
    assert [row[3:6] for row in rows] == [("1", "100 110", "+10.0%")]
    elsewhere = msgspec.structs.replace(other, localchat="9.9")
    said = list(comparison_sentences(one, elsewhere))
    assert "9.9" in said[0] and "--rounds 3" in said[1]


def test_a_chart_has_a_curve_for_each_series() -> None:
    points = [
        point(rate * at, at, variant=name)
        for name, rate in (("a", 9), ("<b>", 5))
        for at in (1, 2, 4)
    ]
    drawn = ElementTree.fromstring(svg(record(*points, variants=("a", "<b>"))))
    lines = [one for one in drawn.iter() if one.tag.endswith("polyline")]
    assert len(lines) == 2 * (1 + 2 + 2)
    assert any("<b>" in (one.text or "") for one in drawn.iter())
    ElementTree.fromstring(svg(record(point(0.01))))


@pytest.mark.parametrize(
    ("page", "found"),
    [
        (
            '# HELP x y\nlocalchat_engine_preemptions_total{model="a"} 2.0\n'
            'localchat_engine_preemptions_total{model="b"} 3.0\nother 5\n',
            {"preemptions": 5.0},
        ),
        ('vllm:kv_cache_usage_perc{engine="0"} 0.25\n', {"kv_used_share": 0.25}),
        ("sglang:token_usage 1e-1\n", {"kv_used_share": 0.1}),
        ("<html>", {}),
    ],
)
def test_counters_of_each_server_are_read(page: str, found: dict[str, float]) -> None:
    assert parse_counters(page) == found


def test_counters_grow_and_gauges_peak() -> None:
    watched = WatchedCounters({"preemptions": 2.0, "kv_used_tokens": 0.0})
    watched.update({"preemptions": 4.0, "kv_used_tokens": 90.0})
    watched.update({"preemptions": 5.0, "kv_used_tokens": 10.0})
    assert watched.grown("preemptions") == 3
    assert watched.grown("drafted") is None
    assert watched.peak["kv_used_tokens"] == 90


def test_energy_is_the_growth_of_the_packages(tmp_path: Path) -> None:
    def write(zone: str, joules: float) -> None:
        folder = tmp_path / zone
        folder.mkdir(exist_ok=True)
        (folder / "energy_uj").write_text(str(int(joules * 1e6)))
        (folder / "max_energy_range_uj").write_text("1000000000")

    write("intel-rapl:0", 990)
    write("intel-rapl:1", 5)
    write("intel-rapl:0:0", 1)
    meter = EnergyMeter(tmp_path)
    assert "processor" in meter.sources
    meter.restart()
    write("intel-rapl:0", 10)  # began again at 1,000
    write("intel-rapl:1", 12)
    write("intel-rapl:0:0", 100)
    assert meter.joules() == pytest.approx(27)


def test_without_counters_there_is_no_energy(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path)
    assert meter.sources or meter.joules() is None


def test_values_beside_each_other_make_every_combination() -> None:
    varied = parse_vary(["kv-type=f16,q8_0", "speculation=on,off"])
    found = variants(("m",), varied, None)
    assert [one.name for one in found] == [
        *("kv-type=f16 speculation=true", "kv-type=f16 speculation=false"),
        *("kv-type=q8_0 speculation=true", "kv-type=q8_0 speculation=false"),
    ]
    assert found[3].settings == {"kv_cache_type": "q8_0", "speculation": "false"}
    slots = variants(("m", "n"), parse_vary(["parallel=4,8"]), 16)
    assert [(one.name, one.parallel, one.settings) for one in slots[:2]] == [
        ("m parallel=4", 4, {}),
        ("m parallel=8", 8, {}),
    ]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("kv-typ=f16,q8_0", "there is no setting 'kv-typ'"),
        ("theme=dark,light", "there is no setting 'theme'"),
        ("threads=4", "at least two values"),
        ("threads=4,many", "threads must be"),
        ("parallel=4,0", "from 1 to 255"),
        ("kv-type", "at least two values"),
    ],
)
def test_wrong_values_are_refused_by_name(word: str, found: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_vary([word])
    assert found in caught.value.message


def test_settings_of_a_running_server_cannot_be_varied() -> None:
    with pytest.raises(UsageError, match="runs already"):
        variants(("http://127.0.0.1:1",), parse_vary(["threads=1,2"]), None)
    with pytest.raises(UsageError, match="named twice"):
        variants(("m", "m"), {}, None)


@pytest.mark.parametrize("width", [20, 44, 120])
def test_bars_fit_into_the_terminal(width: int) -> None:
    (line,) = series([point(1234.5, clients=1), point(98.7, clients=64)])
    drawn = list(bars(line, width))
    assert max(map(len, drawn)) <= width
    assert drawn[0].count("█") > 4 * drawn[1].count("█") and drawn[1].endswith("98.7 tok/s")


def test_an_interrupted_sweep_proposes_no_other_end() -> None:
    points = (point(100, clients=1), point(200, clients=2))
    whole = record(*points)
    (line,) = series(points)
    assert "--max-clients 8 goes on" in " ".join(sentences(whole, line))
    cut = msgspec.structs.replace(whole, complete=False)
    said = " ".join(sentences(cut, line))
    assert "Still rising at 2 clients" in said and "--max-clients" not in said
