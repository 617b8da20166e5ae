"""Benchmarks name the limit that they meet, and the targets that they miss."""

from typing import Any, ClassVar, cast

import pytest

from localchat.measure.bench_report import (
    _disruption_sentences,
    _rate_sentences,
    _times,
    limit_sentences,
    missed_targets,
)
from localchat.measure.records import BenchRecord
from localchat.measure.statistics import PointFigures, disruption_figures, percentiles
from localchat.measure.sweep import Point, PointKey
from tests.support.bench_samples import sample


class Variant:
    name, parallel = "m", 4


class Served:
    variant = Variant()
    properties: ClassVar[dict[str, object]] = {}


class Spec:
    clients = (4,)
    rates = ()


class Record:
    served = (Served(),)
    spec = Spec()
    points: tuple[Point, ...] = ()


def point(clients: int, rate: float = 10.0, **changes: Any) -> Point:
    figures = PointFigures(
        requests=8,
        duration_s=10,
        tokens_per_s=rate,
        total_tokens_per_s=rate,
        requests_per_s=1,
        prompt_tokens=300,
        completion_tokens=40,
        ttft_ms=percentiles([0.1, 0.2]),
        **changes,
    )
    return Point(PointKey("m", "300+40", clients), 0, figures)


def told(*line: Point) -> str:
    return " ".join(limit_sentences(cast(BenchRecord, Record()), line))


def test_a_cache_without_room_for_all_clients_is_the_limit() -> None:
    text = told(point(4, kv_total_tokens=512))
    assert "The limit is the KV cache" in text
    assert "1 request of 340 tokens" in text and "3 of 4 requests wait" in text
    assert "KV cache" not in told(point(4, kv_total_tokens=4096))


def test_more_clients_than_slots_are_named() -> None:
    assert "4 requests at once, and 4 of 8 requests wait" in told(point(8, kv_total_tokens=99_999))


def test_a_missed_target_is_told_for_named_clients_and_for_the_first_point_of_a_sweep() -> None:
    record = Record()
    record.points = (point(1, good_share=1.0), point(4, good_share=0.5))
    assert len(missed_targets(cast(BenchRecord, record))) == 1

    class Sweep:
        clients = ()
        rates = ()

    record.spec = cast(Any, Sweep())
    assert missed_targets(cast(BenchRecord, record)) == []
    record.points = (point(1, good_share=0.5),)
    assert missed_targets(cast(BenchRecord, record))


def test_few_times_are_shown_with_their_range() -> None:
    assert _times(percentiles([0.1, 0.3])) == "200 [100-300]"
    assert _times(percentiles([0.1] * 99 + [0.3])) == "100/100/102"
    # One of a hundred values at least lies beyond a 99th percentile.
    assert _times(percentiles([0.1] * 19 + [0.3])) == "100/110/max 300"


def test_an_open_loop_says_whether_the_server_keeps_up() -> None:
    def at_rate(rate: float, requests_per_s: float, latency_s: float) -> Point:
        figures = PointFigures(
            requests=20,
            duration_s=20 / requests_per_s,
            tokens_per_s=20,
            total_tokens_per_s=40,
            requests_per_s=requests_per_s,
            prompt_tokens=300,
            completion_tokens=40,
            ttft_ms=percentiles([0.1, 0.2]),
            e2el_ms=percentiles([latency_s, latency_s]),
            kv_total_tokens=700,
        )
        return Point(PointKey("m", "300+40", 0, rate), 0, figures)

    calm = [at_rate(0.5, 0.5, 1.0)]
    assert list(_rate_sentences(calm)) == ["The server keeps up with 0.5 requests/s."]
    assert not told(*calm)
    (behind,) = _rate_sentences([*calm, at_rate(4.0, 1.0, 3.0)])
    assert behind.startswith("The server does not keep up with 4 requests/s: it answers 1.00")
    # By Little's law three requests are in the server, and there is room for two.
    assert "1 of 3 requests wait" in told(at_rate(4.0, 1.0, 3.0))


def test_a_disruption_compares_the_gaps_before_and_during_the_burst() -> None:
    streams = [sample(0.0, 0.1, [0.05] * 10 + [0.4, 0.4] + [0.05] * 5)]
    burst = [sample(0.62, 0.7, [0.05], prompt_tokens=2000)]
    figures = disruption_figures(streams, burst, burst_s=0.62)
    assert figures is not None
    assert figures.calm_gap_ms.p50 == pytest.approx(50)
    assert figures.burst_gap_ms.high == pytest.approx(400)
    assert (figures.prompts, figures.prompt_tokens) == (1, 2000)
    (text,) = _disruption_sentences([point(1, disruption=figures)])
    assert "1 prompt of 2,000 tokens" in text and "the longest 400 ms (50.0 before)" in text
    assert disruption_figures(streams, burst, burst_s=9.0) is None
