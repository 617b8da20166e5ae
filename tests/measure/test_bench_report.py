"""Benchmark reports: tables, sentences and bars."""

import msgspec

from localchat.measure.bench_report import (
    differences_table,
    sentences,
    server_table,
    times_table,
)
from localchat.measure.sweep import point_series
from tests.support.bench_samples import point, record


def test_a_table_shows_only_what_was_told() -> None:
    (line,) = point_series([point(100, 1), point(190, 2)])
    head, rows, _ = times_table(line)
    assert rows[0][0] == "1" and rows[0][2] == "100" and rows[1][0] == "2"
    assert rows[0][head.index("TTFT ms")] == "40.0/60.0/80.0"
    assert server_table(line) is None
    told = msgspec.structs.replace(line[0].figures, failed=3, good_share=0.5)
    found = server_table([msgspec.structs.replace(line[0], figures=told)])
    assert found == (["CLIENTS", "GOOD", "FAILED"], [("1", "50%", "3")], 0)


def test_the_saturation_is_named() -> None:
    line = [point(100, 1), point(190, 2), point(192, 4)]
    said, *_ = sentences(record(*line), line)
    assert said.startswith("Saturated from 2 clients on: 192.0 tok/s")
    rising = [point(100, 1), point(190, 2)]
    assert "--max-clients 8" in next(sentences(record(*rising), rising))


def test_answers_that_end_early_are_pointed_out() -> None:
    figures = msgspec.structs.replace(point(100).figures, completion_tokens=30.0)
    line = [msgspec.structs.replace(point(100), figures=figures)]
    assert "30 of 200 tokens" in " ".join(sentences(record(*line), line))


def test_people_are_served_by_the_largest_load_within_the_target() -> None:
    """0.4, 0.75 and 0.8 answers per second, of which some meet the target."""

    def said(*shares: float | None, price: float | None = None) -> str:
        line = [
            msgspec.structs.replace(
                measured, figures=msgspec.structs.replace(measured.figures, good_share=share)
            )
            for measured, share in zip(
                (point(80, 1), point(150, 2), point(160, 4)), shares, strict=True
            )
        ]
        whole = record(*line)
        spec = msgspec.structs.replace(whole.spec, machine_hour=price)
        return " ".join(sentences(msgspec.structs.replace(whole, spec=spec), line))

    assert "serves 38 people who ask once a minute: 4 clients got 0.80" in said(None, None, None)
    assert "serves 36 people who ask once a minute: 2 clients got 0.75" in said(1.0, 0.95, 0.94)
    assert "No measured load meets the target" in said(0.9, 0.5, 0.0)
    # 0.64 answers of 400 tokens per second.
    assert "A million tokens, in and out, cost 3.91 at" in said(None, None, None, price=3.6)


def test_variants_are_set_beside_the_first() -> None:
    points = [
        point(rate, variant=name, round_=at)
        for name, values in (("a", (100, 90, 110)), ("b", (150, 135, 164)), ("c", (101, 89, 111)))
        for at, rate in enumerate(values)
    ]
    found = differences_table(record(*points, variants=("a", "b", "c"), rounds=3))
    assert found is not None
    b, c = found.rows
    assert b[0] == "b" and b[-2].startswith("+49.7%") and b[-1] == "more than noise"
    assert c[-1] == "within noise"
    assert differences_table(record(point(1))) is None


def test_an_interrupted_sweep_proposes_no_other_end() -> None:
    points = (point(100, clients=1), point(200, clients=2))
    whole = record(*points)
    (line,) = point_series(points)
    assert "--max-clients 8 goes on" in " ".join(sentences(whole, line))
    cut = msgspec.structs.replace(whole, complete=False)
    said = " ".join(sentences(cut, line))
    assert "Still rising at 2 clients" in said and "--max-clients" not in said
