"""Sweeps over a scripted server: levels, rounds, variants, and what is kept of an interrupted one."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import ContextExceeded
from localchat.measure.endpoint import BenchEndpoint
from localchat.measure.statistics import PointFigures
from localchat.measure.sweep import (
    Point,
    PointKey,
    PointMeasured,
    PointRefused,
    PointStarted,
    Sweep,
    SweepEvent,
    SweepSpec,
    point_series,
    rates,
    saturation,
)
from localchat.measure.variants import BenchVariant
from localchat.measure.workload import SHAPES, Shape
from tests.support.bench_samples import point
from tests.support.http_server import running
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

SHORT = Shape("30+4", 30, 4)
A, B = BenchVariant("a", "m", {"threads": "1"}), BenchVariant("b", "m", {"threads": "2"})


class Bench:
    """A sweep over one scripted server, and everything that it showed."""

    def __init__(self, engine: ScriptedEngine, **spec: object) -> None:
        self.engine = engine
        self.shown: list[SweepEvent] = []
        self.opened: list[str] = []
        given = {"variants": (A,), "shapes": (SHORT,), "requests": 1, **spec}
        self.sweep = Sweep(SweepSpec(**given), self._open, self.shown.append)  # type: ignore[arg-type]

    @contextmanager
    def _open(self, variant: BenchVariant) -> Iterator[BenchEndpoint]:
        self.opened.append(variant.name)
        with running(self.engine) as (port, _):
            yield BenchEndpoint(f"http://127.0.0.1:{port}")

    def run(self) -> list[Point]:
        self.sweep.run()
        return self.sweep.points

    def of(self, kind: type[SweepEvent]) -> list[SweepEvent]:
        return [event for event in self.shown if isinstance(event, kind)]


def texts(engine: ScriptedEngine) -> list[str]:
    found = []
    for request in engine.requests:
        assert isinstance(request.prompt, Messages)
        found.append("\n".join(message.content for message in request.prompt.messages))
    return found


def words(count: int) -> ScriptedEngine:
    pieces = tuple(f"word{at} " for at in range(count))
    return ScriptedEngine(script=lambda request: ScriptedAnswer(pieces))


def test_every_level_is_measured_once() -> None:
    bench = Bench(words(4), clients=(1, 3), requests=2)
    points = bench.run()
    assert [one.key for one in points] == [
        PointKey("a", "30+4", 1),
        PointKey("a", "30+4", 3),
    ]
    assert [one.figures.requests for one in points] == [2, 6]
    assert points[0].figures.completion_tokens == 4
    assert [one.total for one in bench.of(PointStarted)] == [2, 2]  # type: ignore[union-attr]


def test_no_two_requests_share_a_text() -> None:
    bench = Bench(words(4), clients=(1, 2), requests=2, variants=(A, B), rounds=2)
    bench.run()
    own = [text for text in texts(bench.engine) if "scale" not in text]
    probes = 2 * len(bench.opened)
    assert len(set(own)) >= len(own) - probes + 2


def test_prompts_have_about_the_length_that_the_server_counts() -> None:
    bench = Bench(words(4), clients=(1,), shapes=(Shape("600+4", 600, 4),))
    # Sentences differ in length, so the length of a single prompt depends on the texts of its run.
    bench.sweep.run_id = "lengths"
    assert bench.run()[0].figures.prompt_tokens == pytest.approx(600, rel=0.05)


def test_variants_take_turns_in_both_directions() -> None:
    bench = Bench(words(2), clients=(1,), variants=(A, B), rounds=3)
    points = bench.run()
    assert bench.opened == ["a", "b", "b", "a", "a", "b"]
    assert [(one.key.variant, one.round) for one in points] == [
        *(("a", 0), ("b", 0), ("b", 1)),
        *(("a", 1), ("a", 2), ("b", 2)),
    ]
    assert len(rates(points, PointKey("a", "30+4", 1))) == 3


def test_the_sweep_ends_when_more_clients_bring_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {1: 100.0, 2: 90.0, 4: 210.0, 8: 212.0, 16: 208.0, 32: 300.0}
    real = Sweep._measure

    def faked(self: Sweep, scene: object, key: PointKey) -> Point:
        found = real(self, scene, key)  # type: ignore[arg-type]
        return Point(key, found.round, with_rate(found.figures, measured[key.clients]))

    monkeypatch.setattr(Sweep, "_measure", faked)
    bench = Bench(words(2), max_clients=32, rounds=2)
    points = bench.run()
    assert [one.key.clients for one in points] == [1, 2, 4, 8, 16] * 2
    (line,) = point_series(points)
    found = saturation(line)
    assert found is not None and (found.clients, found.reached) == (4, True)
    assert len(bench.of(PointStarted)) == bench.of(PointStarted)[-1].total == 10  # type: ignore[union-attr]


def with_rate(found: PointFigures, rate: float) -> PointFigures:
    import msgspec

    return msgspec.structs.replace(found, tokens_per_s=rate)


def test_a_throughput_that_still_rises_is_not_saturated() -> None:
    found = saturation([point(100, 1), point(190, 2), point(360, 4)])
    assert found is not None and not found.reached
    assert saturation([point(100, 1)]) is None


def test_a_request_that_the_server_refuses_leaves_its_shape_out() -> None:
    def script(request: GenerateRequest) -> ScriptedAnswer:
        assert isinstance(request.prompt, Messages)
        if len(request.prompt.messages[-1].content) > 3000:
            error = ContextExceeded("the prompt is too long", prompt_tokens=9, context_tokens=4)
            return ScriptedAnswer((), error=error)
        return ScriptedAnswer(("a", "b"))

    bench = Bench(
        ScriptedEngine(script=script), clients=(1,), shapes=(Shape("9000+2", 9000, 2), SHORT)
    )
    points = bench.run()
    assert [one.key.shape for one in points] == ["30+4"]
    (refused,) = bench.of(PointRefused)
    assert isinstance(refused, PointRefused) and refused.key.shape == "9000+2"


def test_an_interrupted_sweep_keeps_its_points() -> None:
    bench = Bench(words(2), clients=(1, 2, 4))

    def show(event: SweepEvent) -> None:
        if isinstance(event, PointMeasured) and event.point.key.clients == 2:
            raise KeyboardInterrupt

    bench.sweep.show = show
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    assert [one.key.clients for one in bench.sweep.points] == [1, 2]
    assert bench.sweep.served["a"].model == "scripted"


def test_the_round_of_the_median_stands_for_all() -> None:
    points = [point(rate, round_=at) for at, rate in enumerate((90, 130, 100))]
    assert [line[0].figures.tokens_per_s for line in point_series(points)] == [100]


def test_shapes_have_names_of_their_own() -> None:
    assert all(name == shape.name for name, shape in SHAPES.items())
