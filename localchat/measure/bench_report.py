"""Benchmark results as text: tables, saturation, limits and differences."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from localchat.measure.records import BenchRecord
from localchat.measure.statistics import Difference, Percentiles, PointFigures, difference
from localchat.measure.sweep import (
    Point,
    PointKey,
    ServedVariant,
    rates,
    saturation,
)
from localchat.measure.workload import Shape
from localchat.units import counted, percent, rate, tokens

_MIN_P95_COUNT: Final = 20
_MIN_P99_COUNT: Final = 100
"""Numbers of values from which at least one lies beyond the percentile."""
_MIN_ARRIVALS: Final = 10
"""Number of requests from which an open loop shows whether a server keeps up."""
_LATE: Final = 1.1
"""Duration of an open loop, relative to its arrivals, from which requests queue."""
_SHORT_SHARE: Final = 0.9
"""Share of the requested length below which short answers are reported."""
_GOOD_SHARE: Final = 0.99
"""Share of the requests that must meet a target."""
_PLANNED_GOOD_SHARE: Final = 0.95
_PLANNED_SHARE: Final = 0.8
"""Planned load as a share of the measured one, which leaves headroom."""
_HOUR_S: Final = 3600


class ReportTable(NamedTuple):
    """A table, whose first `left` columns are aligned to the left."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 0


def heading(record: BenchRecord, series: list[Point]) -> str:
    """Name the conditions of a series: model, settings, shape."""
    key = series[0].key
    shape = _shape(record, key)
    # A shape of lengths states them in its name.
    lengths = "" if "+" in shape.name else f" ({shape.prompt_tokens}+{shape.output_tokens} tokens)"
    return f"{key.variant} · {shape.name}{lengths}"


def _shape(record: BenchRecord, key: PointKey) -> Shape:
    return next(shape for shape in record.spec.shapes if shape.name == key.shape)


def _served(record: BenchRecord, key: PointKey) -> ServedVariant | None:
    return next((served for served in record.served if served.variant.name == key.variant), None)


def times_table(series: list[Point]) -> ReportTable:
    """Tabulate throughput and times of a series, in milliseconds.

    Times are p50/p95/p99 if there are enough values; see `_times`.
    """
    head = (_load_name(series), "N", "TOK/S", "REQ/S", "TTFT ms", "PER TOKEN ms", "GAP ms")
    rows = [
        (
            _load(point.key),
            f"{point.figures.requests:,}",
            _number(point.figures.tokens_per_s),
            f"{point.figures.requests_per_s:.2f}",
            _times(point.figures.ttft_ms),
            _times(point.figures.tpot_ms),
            _times(point.figures.gap_ms),
        )
        for point in series
    ]
    return ReportTable(head, rows)


def server_table(series: list[Point]) -> ReportTable | None:
    """Tabulate what the server reports with its answers; None if it reports nothing."""
    loads = [_load(point.key) for point in series]
    figures = [point.figures for point in series]
    columns: list[tuple[str, list[str]]] = [
        (_load_name(series), loads),
        ("GOOD", [_share(point.good_share) for point in figures]),
        ("GOOD REQ/S", [_cell(point.good_requests_per_s, ".2f") for point in figures]),
        ("PREFIX", [_share(point.prefix_hits) for point in figures]),
        ("KV", [_share(point.kv_used_share) for point in figures]),
        ("DRAFTS", [_drafts(point) for point in figures]),
        ("FAILED", [_cell(point.failed or None, ",") for point in figures]),
    ]
    columns = [(name, cells) for name, cells in columns if any(cell != "-" for cell in cells)]
    if len(columns) < 2:
        return None
    rows = list(zip(*(cells for _, cells in columns), strict=True))
    return ReportTable([name for name, _ in columns], rows)


def _load_name(series: Sequence[Point]) -> str:
    return "REQUESTS/S" if series[0].key.rate else "CLIENTS"


def _load(key: PointKey) -> str:
    return f"{key.rate or key.clients:g}"


def sentences(record: BenchRecord, series: list[Point]) -> Iterator[str]:
    """Explain a series: saturation, limit and short answers."""
    if saturated := saturation(series):
        last = series[-1].key.clients
        if saturated.reached:
            yield (
                f"Saturated from {counted(saturated.clients, 'client')} on: "
                f"{rate(saturated.tokens_per_s)} at most; more clients only wait."
            )
        elif record.complete:
            flag = "--clients" if record.spec.clients else "--max-clients"
            yield f"Still rising at {counted(last, 'client')}: {flag} {last * 4} goes on."
        else:
            yield f"Still rising at {counted(last, 'client')}, the last measured."
    yield from _rate_sentences(series)
    yield from _disruption_sentences(series)
    yield from _capacity_sentences(record, series)
    yield from limit_sentences(record, series)
    output_tokens = _shape(record, series[0].key).output_tokens
    answer_tokens = min(point.figures.completion_tokens for point in series)
    if answer_tokens < _SHORT_SHARE * output_tokens:
        yield (
            f"Answers had {answer_tokens:.0f} of {output_tokens} tokens: the server ends them by itself, so "
            "compare this shape with care."
        )


def _rate_sentences(series: Sequence[Point]) -> Iterator[str]:
    """Report the rates at which requests arrive faster than they are answered."""
    points = [
        point for point in series if point.key.rate and point.figures.requests >= _MIN_ARRIVALS
    ]
    if not points:
        return
    behind = next((point for point in points if _falls_behind(point)), None)
    if behind is None:
        yield f"The server keeps up with {points[-1].key.load}."
        return
    yield (
        f"The server does not keep up with {behind.key.load}: it answers "
        f"{behind.figures.requests_per_s:.2f}, and the others queue, so times grow with the length of the test."
    )


def _falls_behind(point: Point) -> bool:
    """Return True if the last answers ended long after the last arrivals."""
    figures = point.figures
    arrivals_s = figures.requests / point.key.rate
    answer_s = (figures.e2el_ms.low if figures.e2el_ms else 0.0) / 1e3
    return figures.duration_s > arrivals_s * _LATE + 2 * answer_s


def _disruption_sentences(series: Sequence[Point]) -> Iterator[str]:
    """Report what a burst of long prompts does to running streams."""
    for point in series:
        disruption = point.figures.disruption
        if disruption is None:
            continue
        calm = disruption.calm_gap_ms
        disturbed = disruption.burst_gap_ms
        prompts = (
            f"{counted(disruption.prompts, 'prompt')} of {disruption.prompt_tokens:,.0f} tokens"
        )
        yield (
            f"{point.key.load}: while {prompts} are read, the median gap between two tokens is "
            f"{_number(disturbed.p50)} ms ({_number(calm.p50)} before), and the longest "
            f"{_number(disturbed.high)} ms ({_number(calm.high)} before). The prompts wait "
            f"{_number(disruption.burst_ttft_ms.p50)} ms for their first token."
        )


def _capacity_sentences(record: BenchRecord, series: Sequence[Point]) -> Iterator[str]:
    """Say how many people the measured loads can serve, and what their tokens cost."""
    if any(point.figures.disruption is not None for point in series):
        return
    good_shares = [point.figures.good_share for point in series]
    shares = [1.0 if share is None else share for share in good_shares]
    fitting = [
        point for point, share in zip(series, shares, strict=True) if share >= _PLANNED_GOOD_SHARE
    ]
    if not fitting:
        yield "No measured load meets the target: 5 of 100 requests are slower, or more."
        return
    best = max(fitting, key=lambda point: point.figures.requests_per_s)
    requests_per_s = _PLANNED_SHARE * best.figures.requests_per_s
    within = ""
    if record.spec.target:
        within = " within the target"
    yield (
        f"With a fifth of headroom it serves {60 * requests_per_s:,.0f} people who ask once a minute{within}: "
        f"{best.key.load} got {best.figures.requests_per_s:.2f} answers a second."
    )
    if record.spec.machine_hour is not None and requests_per_s:
        length = best.figures.prompt_tokens + best.figures.completion_tokens
        million = record.spec.machine_hour / (_HOUR_S * requests_per_s * length) * 1e6
        yield f"A million tokens, in and out, cost {million:,.2f} at that load."


def limit_sentences(record: BenchRecord, series: Sequence[Point]) -> Iterator[str]:
    """Name the KV cache or the slots if they limit a series."""
    last = series[-1]
    if sentence := _kv_limit(last) or _slot_limit(record, last):
        yield sentence


def _kv_limit(point: Point) -> str:
    """Report a KV cache that cannot hold all clients; empty if it can."""
    figures = point.figures
    clients = _in_flight(point)
    length = figures.prompt_tokens + figures.completion_tokens
    if not figures.kv_total_tokens or length < 1:
        return ""
    room = int(figures.kv_total_tokens // length)
    if room >= clients:
        return ""
    return (
        f"The limit is the KV cache: its {tokens(figures.kv_total_tokens)} have room for "
        f"{counted(room, 'request')} of {length:,.0f} tokens, and {clients - room} of {clients} requests wait "
        "for it. A larger --parallel, --ctx or --kv-gb raises it."
    )


def _slot_limit(record: BenchRecord, point: Point) -> str:
    """Report more clients than slots; empty if all have one, or the slots are unknown."""
    served = _served(record, point.key)
    if served is None:
        return ""
    slots = served.variant.parallel or served.properties.get("total_slots")
    clients = _in_flight(point)
    if not isinstance(slots, int) or clients <= slots:
        return ""
    return (
        f"The limit is the number of slots: the server computes {counted(slots, 'request')} at once, and "
        f"{clients - slots} of {clients} requests wait. --parallel {clients} raises it."
    )


def _in_flight(point: Point) -> int:
    """Return the requests in the server: the clients, or by Little's law in an open loop."""
    figures = point.figures
    if not point.key.rate or figures.e2el_ms is None:
        return point.key.clients
    return round(figures.requests_per_s * figures.e2el_ms.mean / 1e3)


def missed_targets(record: BenchRecord) -> list[str]:
    """Report points where requests missed the targets of --ttft and --tpot.

    Every number of clients that the user named must meet them. An open-ended sweep continues until they are
    missed, so only its first number must meet them.
    """
    points = record.points
    if not record.spec.clients and not record.spec.rates:
        first = min((point.key.clients for point in points), default=0)
        points = tuple(point for point in points if point.key.clients == first)
    missed = []
    for point in points:
        share = point.figures.good_share
        if share is not None and share < _GOOD_SHARE:
            missed.append(
                f"target missed: {point.key.variant}, {point.key.load}: "
                f"{share:.0%} of the requests met it"
            )
    return missed


def differences_table(record: BenchRecord) -> ReportTable | None:
    """Compare the throughput of each variant with the first; None for a single variant."""
    base_name, *names = (variant.name for variant in record.spec.variants)
    rows: list[Sequence[str]] = []
    keys = dict.fromkeys(point.key for point in record.points if point.key.variant == base_name)
    for base_key in keys:
        base = rates(record.points, base_key)
        for name in names:
            values = rates(record.points, msgspec.structs.replace(base_key, variant=name))
            if values and base:
                mean = _number(statistics.fmean(values))
                change = _difference(difference(values, base))
                rows.append((name, *_condition_cells(base_key), mean, *change))
    head = ("", "SHAPE", "CLIENTS", "TOK/S", f"AGAINST {base_name}", "")
    if not rows:
        return None
    return ReportTable(head, rows, left=2)


def _condition_cells(key: PointKey) -> tuple[str, str]:
    load = f"{key.rate:g}/s" if key.rate else str(key.clients)
    return key.shape, load


def _difference(change: Difference) -> tuple[str, str]:
    if change.margin is None:
        return f"{change.share:+.1%}", "one round: noise unknown"
    text = f"{change.share:+.1%} ±{change.margin:.1%}"
    if change.beyond_noise:
        return text, "more than noise"
    return text, "within noise"


def _times(times: Percentiles | None) -> str:
    if times is None:
        return "-"
    if times.count < _MIN_P95_COUNT:
        return f"{_number(times.p50)} [{_number(times.low)}-{_number(times.high)}]"
    start = f"{_number(times.p50)}/{_number(times.p95)}"
    if times.count < _MIN_P99_COUNT:
        return f"{start}/max {_number(times.high)}"
    return f"{start}/{_number(times.p99)}"


def _number(value: float) -> str:
    """Format a number with three digits or more."""
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


def _cell(value: float | None, spec: str) -> str:
    """Format a value that may be unknown."""
    if value is None:
        return "-"
    return format(value, spec)


def _share(share: float | None) -> str:
    if share is None:
        return "-"
    return percent(share, 1)


def _drafts(figures: PointFigures) -> str:
    if figures.drafted:
        return f"{figures.accepted or 0:,}/{figures.drafted:,}"
    return "-"
