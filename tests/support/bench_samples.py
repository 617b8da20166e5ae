"""Recorded requests and points of benchmarks, made by hand."""

from localchat.measure.client import RequestSample
from localchat.measure.records import BenchRecord, MachineRecord
from localchat.measure.statistics import Percentiles, PointFigures
from localchat.measure.sweep import Point, PointKey, ServedVariant, SweepSpec
from localchat.measure.variants import BenchVariant
from localchat.measure.workload import SHAPES


def sample(began_s: float, first_s: float, gaps_s: list[float], **fields: int) -> RequestSample:
    """A request with a token at each arrival. first_s: after it was sent."""
    arrivals = [began_s + first_s]
    for gap_s in gaps_s:
        arrivals.append(arrivals[-1] + gap_s)
    counts = {"prompt_tokens": 100, "completion_tokens": len(arrivals), **fields}
    return RequestSample(began_s=began_s, arrivals_s=tuple(arrivals), **counts)


def point(rate: float, clients: int = 1, *, variant: str = "m", round_: int = 0) -> Point:
    """A point of the shape chat with this throughput."""
    found = PointFigures(
        requests=4 * clients,
        duration_s=1.0,
        tokens_per_s=rate,
        total_tokens_per_s=2 * rate,
        requests_per_s=rate / 200,
        prompt_tokens=200,
        completion_tokens=200,
        ttft_ms=Percentiles(40, 60, 80, 45, count=200, p95=60, low=30, high=90),
        tpot_ms=Percentiles(10, 12, 15, 11, count=200, p95=12, low=9, high=20),
    )
    return Point(PointKey(variant, "chat", clients), round_, found)


def record(
    *points: Point, variants: tuple[str, ...] = ("m",), rounds: int = 1, model: str = "m"
) -> BenchRecord:
    """A record of these points."""
    made = tuple(BenchVariant(name, model) for name in variants)
    return BenchRecord(
        at="2026-11-23T10:00:00+00:00",
        machine=MachineRecord("A processor", 2, 8_000_000_000, (), "Linux x86_64"),
        spec=SweepSpec(variants=made, shapes=(SHAPES["chat"],), rounds=rounds),
        served=tuple(ServedVariant(variant=one, model=model) for one in made),
        points=points,
    )
