"""Figures of a measured point, by the formulas of vLLM's serving benchmark; and differences beyond noise.

TTFT: from the request to its first text. TPOT: from the first text to the last, over the tokens after the
first. Gap (ITL): between two arrivals of one answer. E2EL: from the request to its last text. Throughput:
tokens of all answers over the time from the first request to the end of the last answer. Percentiles
interpolate linearly.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from localchat.measure.client import RequestSample
from localchat.metrics import acceptance

_SAME_ARRIVAL_S: Final = 0.5e-3
"""Events closer than this were sent together."""


class Percentiles(msgspec.Struct, frozen=True, omit_defaults=True):
    """Distribution of a time, in milliseconds."""

    p50: float
    p90: float
    p99: float
    mean: float
    count: int = 0
    """Times in the distribution; 0 in a record of before it was stored."""
    low: float = 0.0
    """Smallest time."""
    high: float = 0.0
    """Largest time."""


class LatencyTarget(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer must keep to count as good. None: no demand."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def met_by(self, sample: RequestSample) -> bool:
        """Whether a request met every demand; a time that an answer has not counts as met."""
        tpot_s = sample.tpot_s
        slow_start = self.ttft_ms is not None and sample.ttft_s * 1e3 > self.ttft_ms
        slow = self.tpot_ms is not None and tpot_s is not None and tpot_s * 1e3 > self.tpot_ms
        return not slow_start and not slow


class PointFigures(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Everything that was measured at one point. None: nothing told."""

    requests: int
    failed: int = 0
    duration_s: float
    tokens_per_s: float
    """Of answers, all requests together."""
    total_tokens_per_s: float
    """Of prompts and answers."""
    requests_per_s: float
    prompt_tokens: float
    """Mean of a request."""
    completion_tokens: float
    """Mean of an answer."""
    ttft_ms: Percentiles
    tpot_ms: Percentiles | None = None
    gap_ms: Percentiles | None = None
    e2el_ms: Percentiles | None = None
    """From the request to its last text; None in a record of before it was measured."""
    step_ms: float | None = None
    """Time per token while no prompt of another request delays it: of the median pause of a stream."""
    good_requests_per_s: float | None = None
    """Requests a second that met the target."""
    good_share: float | None = None
    prefix_hits: float | None = None
    """Share of the prompt tokens that came from the server's prefix cache."""
    kv_used_tokens: int | None = None
    """The most that was seen."""
    kv_total_tokens: int | None = None
    kv_used_share: Annotated[float, Meta(ge=0)] | None = None
    drafted: int | None = None
    accepted: int | None = None
    acceptance: float | None = None
    preemptions: int | None = None
    joules: float | None = None
    """Of the processor and the GPUs during the point, other programs included."""
    roof_share: float | None = None
    """Bytes that its steps read, over what the memory could have read in that time."""


class LoadResult(NamedTuple):
    """Recorded requests of one point."""

    samples: Sequence[RequestSample]
    failed: int
    duration_s: float
    """From the first request to the end of the last answer."""


def figures(result: LoadResult, target: LatencyTarget) -> PointFigures:
    """Figures of recorded requests; those that only a server or a sensor tells are left out.

    Raises statistics.StatisticsError for no requests."""
    samples = result.samples
    duration_s = result.duration_s
    made = sum(one.completion_tokens for one in samples)
    read = sum(one.prompt_tokens for one in samples)
    tpots = [tpot_s for one in samples if (tpot_s := one.tpot_s) is not None]
    good = sum(map(target.met_by, samples)) if target else None
    known = [one for one in samples if one.drafted is not None]
    drafted = sum(one.drafted or 0 for one in known) if known else None
    accepted = sum(one.accepted or 0 for one in known) if known else None
    kv_total = max(one.kv_total_tokens for one in samples)
    kv_used = max(one.kv_used_tokens for one in samples)
    return PointFigures(
        requests=len(samples),
        failed=result.failed,
        duration_s=duration_s,
        tokens_per_s=made / duration_s,
        total_tokens_per_s=(made + read) / duration_s,
        requests_per_s=len(samples) / duration_s,
        prompt_tokens=read / len(samples),
        completion_tokens=made / len(samples),
        ttft_ms=percentiles([one.ttft_s for one in samples]),
        tpot_ms=percentiles(tpots) if tpots else None,
        gap_ms=percentiles(gaps) if (gaps := _gaps(samples)) else None,
        e2el_ms=percentiles([one.latency_s for one in samples]),
        step_ms=_step_ms(samples, gaps),
        good_requests_per_s=None if good is None else good / duration_s,
        good_share=None if good is None else good / (len(samples) + result.failed),
        prefix_hits=sum(one.cached_tokens for one in samples) / read if read else None,
        kv_used_tokens=kv_used if kv_total else None,
        kv_total_tokens=kv_total or None,
        kv_used_share=kv_used / kv_total if kv_total else None,
        drafted=drafted,
        accepted=accepted,
        acceptance=acceptance(drafted or 0, accepted or 0),
    )


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Percentiles of times in seconds. Raises statistics.StatisticsError for none."""
    mean = statistics.fmean(seconds)
    if len(seconds) == 1:
        ms = mean * 1e3
        return Percentiles(p50=ms, p90=ms, p99=ms, mean=ms, count=1, low=ms, high=ms)
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return Percentiles(
        p50=cuts[49] * 1e3,
        p90=cuts[89] * 1e3,
        p99=cuts[98] * 1e3,
        mean=mean * 1e3,
        count=len(seconds),
        low=min(seconds) * 1e3,
        high=max(seconds) * 1e3,
    )


def _gaps(samples: Sequence[RequestSample]) -> list[float]:
    return [
        later - earlier
        for one in samples
        for earlier, later in zip(one.arrivals_s, one.arrivals_s[1:], strict=False)
    ]


def _step_ms(samples: Sequence[RequestSample], gaps: Sequence[float]) -> float | None:
    """The median pause, shared by the tokens that arrive after one: several, where drafts were accepted."""
    pauses = [gap for gap in gaps if gap > _SAME_ARRIVAL_S]
    tokens = sum(one.completion_tokens - 1 for one in samples)
    if not pauses or tokens < 1:
        return None
    return statistics.median(pauses) * min(len(pauses) / tokens, 1.0) * 1e3


# ---------------------------------------------------------------------------- differences

_T_95: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for a two-sided interval of 95 %, by degrees of freedom from 1 on; then 2.0 is near enough."""


class Difference(msgspec.Struct, frozen=True):
    """How much larger one series of rounds is than another, as a share of the other."""

    share: float
    """0.1: a tenth more."""
    margin: float | None
    """Half of the interval that holds the true share in 95 of 100 cases; None: one round shows none."""

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval excludes no difference at all."""
        return self.margin is not None and abs(self.share) > self.margin


def difference(values: Sequence[float], base: Sequence[float]) -> Difference:
    """The mean difference of rounds that were taken in turns, pair by pair, so that slow changes cancel out.

    Raises statistics.StatisticsError for no rounds."""
    ratios = [math.log(one / other) for one, other in zip(values, base, strict=False)]
    mean = statistics.fmean(ratios)
    share = math.expm1(mean)
    if len(ratios) < 2:
        return Difference(share, None)
    t = _T_95[len(ratios) - 2] if len(ratios) - 2 < len(_T_95) else 2.0
    spread = t * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return Difference(share, (1 + share) * math.expm1(spread))
