"""Benchmarks name the limit that they meet, and the targets that they miss."""

from typing import Any, ClassVar, cast

import pytest

from localchat.measure.bench_report import _times, limit_sentences, missed_targets
from localchat.measure.records import BenchRecord
from localchat.measure.statistics import PointFigures, percentiles
from localchat.measure.sweep import Point, PointKey


class Variant:
    name, parallel = "m", 4


class Served:
    variant = Variant()
    properties: ClassVar[dict[str, object]] = {}


class Spec:
    clients = (4,)


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
    return Point(PointKey("m", "300+40", 0, clients), 0, figures)


def told(*line: Point) -> str:
    return " ".join(limit_sentences(cast(BenchRecord, Record()), line))


def test_a_cache_without_room_for_all_clients_is_the_limit() -> None:
    text = told(point(4, kv_total_tokens=512))
    assert "The limit is the KV cache" in text
    assert "1 request of 340 tokens" in text and "3 of 4 clients wait" in text
    assert "KV cache" not in told(point(4, kv_total_tokens=4096))


def test_more_clients_than_slots_are_named() -> None:
    assert "4 requests at once, and 4 of 8 clients wait" in told(point(8, kv_total_tokens=99_999))


@pytest.mark.parametrize(
    ("roof", "words"), [(0.9, "memory bandwidth"), (0.2, "compute"), (None, "")]
)
def test_a_saturated_series_is_limited_by_bandwidth_or_compute(
    roof: float | None, words: str
) -> None:
    line = [point(count, roof_share=roof, kv_total_tokens=9999) for count in (1, 2, 4)]
    assert words in told(*line)
    assert bool(told(*line)) is bool(words)


def test_a_missed_target_is_told_for_named_clients_and_for_the_first_point_of_a_sweep() -> None:
    record = Record()
    record.points = (point(1, good_share=1.0), point(4, good_share=0.5))
    assert len(missed_targets(cast(BenchRecord, record))) == 1

    class Sweep:
        clients = ()

    record.spec = cast(Any, Sweep())
    assert missed_targets(cast(BenchRecord, record)) == []
    record.points = (point(1, good_share=0.5),)
    assert missed_targets(cast(BenchRecord, record))


def test_few_times_are_shown_with_their_range() -> None:
    assert _times(percentiles([0.1, 0.3])) == "200 [100-300]"
    assert _times(percentiles([0.1] * 20)) == "100/100/100"
