"""Prometheus metrics, observed from each request and read from the engines on every scrape.

Names and descriptions come from the table in localchat/metrics.py. No label contains a value that a client
chose, so that the number of labels stays small: no model names from requests, no texts, no keys.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from localchat.engine.events import Done, EngineStats
from localchat.engine.interface import Engine
from localchat.metrics import METRICS
from localchat.server.engine_totals import COUNTS, EngineTotals, failures
from localchat.server.tracker import RequestTracker, TrackedRequest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_LABELS: Final = ("prompt", "cache", "guided", "speculation")
_PROMPTS: Final = (256, 1024, 4096, 16_384, 65_536)
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SPEEDUPS: Final = (0.7, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_MAX_REASONS: Final = 64
_NUMBER: Final = re.compile(r"\d[\d.,]*")
_TOKEN_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


def prompt_bucket(tokens: int) -> str:
    """Return the label for the length of a prompt: the smallest bound that is not exceeded."""
    for bound in _PROMPTS:
        if tokens <= bound:
            return f"<={bound}"
    return f">{_PROMPTS[-1]}"


class Metrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(self, tracker: RequestTracker) -> None:
        self._registry = CollectorRegistry()
        self.engine_totals = EngineTotals()
        self._engines = _EngineMetrics(tracker, self.engine_totals)
        self._registry.register(self._engines)
        self._ttft = self._histogram("ttft_seconds", METRICS["ttft_s"].about, _SECONDS)
        self._queue = self._histogram("queue_seconds", METRICS["queue_s"].about, _SECONDS)
        self._total = self._histogram("request_seconds", METRICS["total_s"].about, _SECONDS)
        self._tpot = self._histogram("tpot_seconds", METRICS["tpot_ms"].about, _TOKEN_SECONDS)
        self._speedup = self._histogram("speedup", METRICS["speedup"].about, _SPEEDUPS)
        self._off = self._counter("speculation_off", METRICS["speculation_off"].about, ("reason",))
        self._missed = self._counter("cache_missed", METRICS["why_missed"].about, ("reason",))
        self._reasons: set[str] = set()
        self._prompt = self._counter("prompt_tokens", METRICS["prompt_tokens"].about)
        self._cached = self._counter("cached_tokens", METRICS["cached_tokens"].about)
        self._completion = self._counter("completion_tokens", METRICS["completion_tokens"].about)
        self._requests = self._counter("requests", "Requests by their end.", ("finish",))
        self._errors = self._counter("errors", "Refused and failed requests.", ("code", "status"))
        self._client_gone = self._counter(
            "client_gone", "Requests whose client left before the end."
        )

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            f"localchat_{name}", about, _LABELS, buckets=buckets, registry=self._registry
        )

    def _counter(self, name: str, about: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"localchat_{name}", about, labels, registry=self._registry)

    def count_error(self, code: str, status: int) -> None:
        """Count an error response."""
        self._errors.labels(code, str(status)).inc()

    def observe_request(self, tracked: TrackedRequest) -> None:
        """Record a request that is over."""
        if tracked.client_left:
            self._client_gone.inc()
        if tracked.finish_reason:
            self._requests.labels(tracked.finish_reason).inc()
        if tracked.usage is not None:
            self._prompt.inc(tracked.usage.prompt_tokens)
            self._cached.inc(tracked.usage.cached_tokens)
            self._completion.inc(tracked.usage.completion_tokens)
        if tracked.why_missed:
            self._missed.labels(self._reason(tracked.why_missed)).inc()
        if tracked.done is not None:
            self._observe(tracked, tracked.done)

    def _reason(self, text: str) -> str:
        """Return a reason as the value of a label: without numbers, and one of at most 64."""
        # Each new value of a label is a time series that Prometheus stores for good.
        reason = _NUMBER.sub("N", text)
        if len(self._reasons) < _MAX_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else "other"

    def _observe(self, tracked: TrackedRequest, done: Done) -> None:
        labels = (
            prompt_bucket(done.usage.prompt_tokens),
            "hit" if done.usage.cached_tokens else "miss",
            "yes" if tracked.guided else "no",
            "off" if done.speculation.off else "on",
        )
        if done.speculation.off:
            self._off.labels(self._reason(done.speculation.off)).inc()
        if done.speculation.speedup is not None:
            self._speedup.labels(*labels).observe(done.speculation.speedup)
        timings = done.timings
        self._queue.labels(*labels).observe(timings.queue_s)
        self._total.labels(*labels).observe(timings.total_s)
        if timings.ttft_s is not None:
            self._ttft.labels(*labels).observe(timings.ttft_s)
        if timings.tpot_ms_p50 is not None:
            self._tpot.labels(*labels).observe(timings.tpot_ms_p50 / 1000)

    def render(self, stats: Sequence[tuple[str, Engine, EngineStats]]) -> bytes:
        """Return the page for scrapers. `stats`: model name, engine and statistics of the running engines."""
        for model, engine, engine_stats in stats:
            self.engine_totals.observe(model, engine, engine_stats)
        self._engines.latest = [(model, engine_stats) for model, _, engine_stats in stats]
        return generate_latest(self._registry)


_GAUGES: Final = (
    *("running", "waiting", "kv_used_tokens", "kv_shared_tokens", "kv_cached_tokens"),
    *("kv_swapped_tokens", "kv_total_tokens"),
)


class _EngineMetrics(Collector):
    """Gauges of running engines and counters of all engines, read on every scrape."""

    def __init__(self, tracker: RequestTracker, totals: EngineTotals) -> None:
        self._tracker = tracker
        self._totals = totals
        self.latest: Sequence[tuple[str, EngineStats]] = ()

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        about = "Requests of the endpoint that an engine has begun."
        yield GaugeMetricFamily("localchat_http_running", about, self._tracker.running)
        about = "Requests of the endpoint that wait for an engine."
        yield GaugeMetricFamily("localchat_http_waiting", about, self._tracker.waiting)
        for name in _GAUGES:
            values = [(model, getattr(stats.now, name)) for model, stats in self.latest]
            yield _gauge_by_model(name, METRICS[name].about, values)
        sizes = [(model, stats.process_bytes) for model, stats in self.latest]
        yield _gauge_by_model("process_bytes", "Resident memory of an engine's process.", sizes)
        yield from self._counters()

    def _counters(self) -> Iterable[Metric]:
        totals = self._totals.totals()
        for name in COUNTS:
            counter = CounterMetricFamily(
                f"localchat_engine_{name}", METRICS[name].about, labels=("model",)
            )
            for model, counts in totals.items():
                counter.add_metric((model,), counts[name, ""])
            yield counter
        failed = CounterMetricFamily(
            "localchat_engine_failed",
            "Requests that an engine ended by an error.",
            labels=("model", "code"),
        )
        for model, counts in totals.items():
            for code, count in failures(counts):
                failed.add_metric((model, code), count)
        yield failed


def _gauge_by_model(
    name: str, about: str, values: Iterable[tuple[str, float]]
) -> GaugeMetricFamily:
    # A model that is loaded twice, with other options, is one series: Prometheus rejects duplicates.
    sums: dict[str, float] = {}
    for model, value in values:
        sums[model] = sums.get(model, 0) + value
    gauge = GaugeMetricFamily(f"localchat_{name}", about, labels=("model",))
    for model, value in sums.items():
        gauge.add_metric((model,), value)
    return gauge
