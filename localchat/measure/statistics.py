"""Figures of a measured point, by the formulas of vLLM's serving benchmark.

TTFT: from the request to its first text. TPOT: from the first text to the last, over the tokens after the
first. Gap (ITL): between two arrivals of one answer. E2EL: from the request to its last text. Throughput:
tokens of all answers over the time from the first request to the end of the last answer. Percentiles
interpolate linearly.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from localchat.measure.client import RequestSample
from localchat.metrics import acceptance


class Percentiles(msgspec.Struct, frozen=True):
    """Distribution of a time, in milliseconds."""

    p50: float
    p90: float
    p99: float
    mean: float
    count: int
    """Number of values."""
    p95: float
    low: float
    """Smallest value."""
    high: float
    """Largest value."""


class LatencyTarget(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits that a good answer meets. None stands for no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def is_met_by(self, sample: RequestSample) -> bool:
        """Return True if a request met the target. A missing time counts as met."""
        if self.ttft_ms is not None and sample.ttft_s * 1e3 > self.ttft_ms:
            return False
        if self.tpot_ms is None or sample.tpot_s is None:
            return True
        return sample.tpot_s * 1e3 <= self.tpot_ms


class DisruptionFigures(msgspec.Struct, frozen=True):
    """Gaps between tokens of streams before and during a burst of long prompts."""

    prompts: int
    prompt_tokens: float
    """Mean prompt length of the burst."""
    calm_gap_ms: Percentiles
    burst_gap_ms: Percentiles
    burst_ttft_ms: Percentiles
    """Time to first token of the burst's prompts."""


class PointFigures(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """All figures of one point. None stands for a figure that the server does not report.

    Size: each field is a column of the tables or a key of `--json`.
    """

    requests: int
    failed: int = 0
    duration_s: float
    tokens_per_s: float
    """Output tokens of all requests."""
    total_tokens_per_s: float
    """Tokens of prompts and answers."""
    requests_per_s: float
    prompt_tokens: float
    """Mean prompt length."""
    completion_tokens: float
    """Mean answer length."""
    ttft_ms: Percentiles
    tpot_ms: Percentiles | None = None
    gap_ms: Percentiles | None = None
    e2el_ms: Percentiles | None = None
    """Time from the request to its last text."""
    good_requests_per_s: float | None = None
    """Requests per second that met the target."""
    good_share: float | None = None
    prefix_hits: float | None = None
    """Share of the prompt tokens that hit the server's prefix cache."""
    kv_used_tokens: int | None = None
    """Largest reading."""
    kv_total_tokens: int | None = None
    kv_used_share: Annotated[float, Meta(ge=0)] | None = None
    drafted: int | None = None
    accepted: int | None = None
    acceptance: float | None = None
    disruption: DisruptionFigures | None = None
    """Gaps of the streams before and during a burst of long prompts; None without a burst."""


class LoadResult(NamedTuple):
    """Recorded requests of one point."""

    samples: Sequence[RequestSample]
    failed: int
    duration_s: float
    """Time from the first request to the end of the last answer."""


def figures(result: LoadResult, target: LatencyTarget) -> PointFigures:
    """Compute the figures that the samples show.

    Raises statistics.StatisticsError for no samples.
    """
    samples = result.samples
    duration_s = result.duration_s
    output_tokens = sum(sample.completion_tokens for sample in samples)
    prompt_tokens = sum(sample.prompt_tokens for sample in samples)
    tpots = [tpot_s for sample in samples if (tpot_s := sample.tpot_s) is not None]
    gaps = _gaps(samples)
    good_requests_per_s = good_share = None
    if target:
        good = sum(map(target.is_met_by, samples))
        good_requests_per_s = good / duration_s
        good_share = good / (len(samples) + result.failed)
    drafted = accepted = None
    if drafting := [sample for sample in samples if sample.drafted is not None]:
        drafted = sum(sample.drafted or 0 for sample in drafting)
        accepted = sum(sample.accepted or 0 for sample in drafting)
    kv_total = max(sample.kv_total_tokens for sample in samples)
    kv_used = max(sample.kv_used_tokens for sample in samples)
    return PointFigures(
        requests=len(samples),
        failed=result.failed,
        duration_s=duration_s,
        tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(output_tokens + prompt_tokens) / duration_s,
        requests_per_s=len(samples) / duration_s,
        prompt_tokens=prompt_tokens / len(samples),
        completion_tokens=output_tokens / len(samples),
        ttft_ms=percentiles([sample.ttft_s for sample in samples]),
        tpot_ms=percentiles(tpots) if tpots else None,
        gap_ms=percentiles(gaps) if gaps else None,
        e2el_ms=percentiles([sample.latency_s for sample in samples]),
        good_requests_per_s=good_requests_per_s,
        good_share=good_share,
        prefix_hits=_ratio(sum(sample.cached_tokens for sample in samples), prompt_tokens),
        kv_used_tokens=kv_used if kv_total else None,
        kv_total_tokens=kv_total or None,
        kv_used_share=_ratio(kv_used, kv_total),
        drafted=drafted,
        accepted=accepted,
        acceptance=acceptance(drafted or 0, accepted or 0),
    )


def disruption_figures(
    streams: Sequence[RequestSample], burst: Sequence[RequestSample], burst_s: float
) -> DisruptionFigures | None:
    """Compare the gaps before a burst with those until its last prompt was read.

    burst_s: time at which the burst was sent. None if no stream decoded before it, or during it.
    """
    read_s = max(sample.arrivals_s[0] for sample in burst)
    calm = []
    disturbed = []
    for sample in streams:
        for earlier_s, later_s in pairwise(sample.arrivals_s):
            if later_s <= burst_s:
                calm.append(later_s - earlier_s)
            elif earlier_s <= read_s:
                disturbed.append(later_s - earlier_s)
    if not calm or not disturbed:
        return None
    return DisruptionFigures(
        prompts=len(burst),
        prompt_tokens=statistics.fmean(sample.prompt_tokens for sample in burst),
        calm_gap_ms=percentiles(calm),
        burst_gap_ms=percentiles(disturbed),
        burst_ttft_ms=percentiles([sample.ttft_s for sample in burst]),
    )


def _ratio(part: int, total: int) -> float | None:
    if not total:
        return None
    return part / total


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Compute percentiles of times in seconds. Raises statistics.StatisticsError for no times."""
    mean = statistics.fmean(seconds)
    if len(seconds) == 1:
        ms = mean * 1e3
        return Percentiles(p50=ms, p90=ms, p99=ms, mean=ms, count=1, p95=ms, low=ms, high=ms)
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return Percentiles(
        p50=cuts[49] * 1e3,
        p90=cuts[89] * 1e3,
        p99=cuts[98] * 1e3,
        mean=mean * 1e3,
        count=len(seconds),
        p95=cuts[94] * 1e3,
        low=min(seconds) * 1e3,
        high=max(seconds) * 1e3,
    )


def _gaps(samples: Sequence[RequestSample]) -> list[float]:
    return [
        later - earlier
        for sample in samples
        for earlier, later in zip(sample.arrivals_s, sample.arrivals_s[1:], strict=False)
    ]


_T_95: Final = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t of a two-sided 95 % interval for 1, 2, ... degrees of freedom. Beyond them, 2.0 is close."""


class Difference(msgspec.Struct, frozen=True):
    """Difference between two series of rounds, as a share of the second."""

    share: float
    """0.1 stands for a tenth more."""
    margin: float | None
    """Half the width of the 95 % interval; None for a single round."""

    @property
    def beyond_noise(self) -> bool:
        """True if the interval excludes a difference of zero."""
        return self.margin is not None and abs(self.share) > self.margin


def difference(values: Sequence[float], base: Sequence[float]) -> Difference:
    """Return the mean difference of interleaved rounds.

    Rounds are compared pair by pair, so that slow drifts cancel out.
    Raises statistics.StatisticsError for no rounds.
    """
    ratios = [math.log(value / other) for value, other in zip(values, base, strict=False)]
    share = math.expm1(statistics.fmean(ratios))
    freedom = len(ratios) - 1
    if freedom < 1:
        return Difference(share, None)
    t = _T_95[freedom - 1] if freedom <= len(_T_95) else 2.0
    spread = t * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return Difference(share, (1 + share) * math.expm1(spread))
