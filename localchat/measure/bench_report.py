"""Results of a benchmark in words: tables, bars, saturation, differences."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from localchat.measure.bench_record import BenchRecord, differing_facts
from localchat.measure.limits import limit_sentences
from localchat.measure.statistics import Difference, Percentiles, PointFigures, difference
from localchat.measure.sweep import Point, PointPlace, rates, saturation, series
from localchat.units import percent, rate, size

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Head and rows; all columns are aligned to the right."""

_BAR_CELLS: Final = 40
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
MIN_PERCENTILE_COUNT: Final = 20
"""Fewer times show no 90th or 99th percentile."""
_SHORT_SHARE: Final = 0.9
"""Answers that are shorter than this share of what was asked deserve a sentence."""


def heading(record: BenchRecord, line: list[Point]) -> str:
    """What a series measures: model, settings, shape."""
    place = line[0].place
    shape = next(one for one in record.spec.shapes if one.name == place.shape)
    lengths = "" if "+" in shape.name else f" ({shape.prompt_tokens}+{shape.output_tokens} tokens)"
    context = f", after {place.context_tokens:,} tokens of context" if place.context_tokens else ""
    return f"{place.variant} · {shape.name}{lengths}{context}"


def times_table(line: list[Point]) -> Table:
    """Throughput and times of a series, in milliseconds.

    Times are p50/p90/p99; of fewer than 20 requests, the median with minimum and maximum.
    """
    head = ("CLIENTS", "N", "TOK/S", "REQ/S", "TTFT ms", "PER TOKEN ms", "GAP ms")
    rows = []
    for point in line:
        found = point.figures
        rows.append(
            (
                str(point.place.clients),
                f"{found.requests:,}",
                _number(found.tokens_per_s),
                f"{found.requests_per_s:.2f}",
                _times(found.ttft_ms),
                _times(found.tpot_ms),
                _times(found.gap_ms),
            )
        )
    return head, rows


def server_table(line: list[Point]) -> Table | None:
    """What the server and the sensors tell; None where they tell nothing. Silent columns are left out."""
    columns: list[tuple[str, list[str]]] = [
        ("CLIENTS", [str(point.place.clients) for point in line]),
        ("GOOD", [_share(point.figures.good_share) for point in line]),
        ("GOOD REQ/S", [_decimal(point.figures.good_requests_per_s) for point in line]),
        ("PREFIX", [_share(point.figures.prefix_hits) for point in line]),
        ("KV", [_share(point.figures.kv_used_share) for point in line]),
        ("DRAFTS", [_drafts(point.figures) for point in line]),
        ("PREEMPTED", [_count(point.figures.preemptions) for point in line]),
        ("FAILED", [_count(point.figures.failed or None) for point in line]),
        ("J/TOKEN", [_joules(point.figures) for point in line]),
        ("ROOF", [_share(point.figures.roof_share) for point in line]),
    ]
    shown = [(name, cells) for name, cells in columns if any(cell != "-" for cell in cells)]
    if len(shown) < 2:
        return None
    return [name for name, _ in shown], list(zip(*(cells for _, cells in shown), strict=True))


def bars(line: list[Point], width: int) -> Iterator[str]:
    """Throughput by clients as bars. width: of the terminal."""
    best = max(point.figures.tokens_per_s for point in line)
    digits = len(str(line[-1].place.clients))
    labels = [rate(point.figures.tokens_per_s) for point in line]
    cells = max(min(_BAR_CELLS, width - digits - max(map(len, labels)) - 2), 1)
    for point, label in zip(line, labels, strict=True):
        bar = _bar(point.figures.tokens_per_s / best, cells)
        yield f"{point.place.clients:>{digits}} {bar} {label}"


def sentences(record: BenchRecord, line: list[Point]) -> Iterator[str]:
    """What a series shows beyond its figures."""
    if (found := saturation(line)) is not None:
        if found.reached:
            yield (
                f"Saturated from {_clients(found.clients)} on: {rate(found.tokens_per_s)} at most; more "
                "clients only wait."
            )
        else:
            last = line[-1].place.clients
            flag = "--clients" if record.spec.clients else "--max-clients"
            further = f": {flag} {last * 4} goes on" if record.complete else ", the last measured"
            yield f"Still rising at {_clients(last)}{further}."
    yield from limit_sentences(record, line)
    first = line[0]
    served = next((one for one in record.served if one.variant.name == first.place.variant), None)
    if served is not None and served.roof is not None and first.figures.roof_share is not None:
        roof = served.roof
        how = "measured" if roof.measured else "the driver's peak"
        cached = "; above 100% the weights stay in the processor's cache" * (
            max(point.figures.roof_share or 0 for point in line) > 1
        )
        yield (
            f"The roof: a step reads {size(roof.weights_bytes)} of weights and "
            f"{size(roof.kv_bytes_per_token)} of KV for each token held, and the memory reads "
            f"{size(roof.bytes_per_s)}/s ({how}){cached}."
        )
    shape = next(one for one in record.spec.shapes if one.name == first.place.shape)
    made = min(point.figures.completion_tokens for point in line)
    if made < _SHORT_SHARE * shape.output_tokens:
        yield (
            f"Answers had {made:.0f} of {shape.output_tokens} tokens: the server ends them by itself, so "
            "compare this shape with care."
        )


def differences_table(record: BenchRecord) -> Table | None:
    """Throughput of every variant beside the first, at the places that both have; None for one variant."""
    names = [variant.name for variant in record.spec.variants]
    if len(names) < 2:
        return None
    rows: list[Sequence[str]] = []
    places = list(dict.fromkeys(point.place for point in record.points))
    for place in (one for one in places if one.variant == names[0]):
        base = rates(record.points, place)
        for name in names[1:]:
            other = PointPlace(name, place.shape, place.context_tokens, place.clients)
            values = rates(record.points, other)
            if values and base:
                found = difference(values, base)
                rows.append(
                    (name, *_place_cells(place), _number(_mean(values)), *_difference(found))
                )
    head = ("", "SHAPE", "CONTEXT", "CLIENTS", "TOK/S", f"AGAINST {names[0]}", "")
    return (head, rows) if rows else None


def comparison_table(one: BenchRecord, other: BenchRecord) -> Table:
    """Two records at the places that both have: throughput, and the times of the median."""
    head = ("", "SHAPE", "CONTEXT", "CLIENTS", "TOK/S", "", "TTFT ms", "", "PER TOKEN ms", "")
    rows: list[Sequence[str]] = []
    others = {_key(other, point): point for line in series(other.points) for point in line}
    for line in series(one.points):
        for point in line:
            match = others.get(_key(one, point))
            if match is None:
                continue
            first = point.figures
            second = match.figures
            rows.append(
                (
                    point.place.variant,
                    *_place_cells(point.place),
                    *_pair(first.tokens_per_s, second.tokens_per_s),
                    *_pair(first.ttft_ms.p50, second.ttft_ms.p50),
                    *_pair(
                        *(each.tpot_ms.p50 if each.tpot_ms else None for each in (first, second))
                    ),
                )
            )
    return head, rows


def comparison_sentences(one: BenchRecord, other: BenchRecord) -> Iterator[str]:
    """What makes two records hard to compare."""
    if facts := differing_facts(one, other):
        yield f"They differ in more than time: {'; '.join(facts)}."
    if min(one.spec.rounds, other.spec.rounds) < 2:
        yield "A record of one round shows no noise; --rounds 3 does."


def _key(record: BenchRecord, point: Point) -> tuple[str, PointPlace]:
    """Where to look in another record: a record of one variant goes beside any other of one."""
    place = point.place
    name = place.variant if len(record.spec.variants) > 1 else ""
    return name, PointPlace(name, place.shape, place.context_tokens, place.clients)


def _place_cells(place: PointPlace) -> tuple[str, str, str]:
    return place.shape, f"{place.context_tokens:,}", str(place.clients)


def _difference(found: Difference) -> tuple[str, str]:
    if found.margin is None:
        return f"{found.share:+.1%}", "one round: noise unknown"
    words = "more than noise" if found.beyond_noise else "within noise"
    return f"{found.share:+.1%} ±{found.margin:.1%}", words


def _pair(first: float | None, second: float | None) -> tuple[str, str]:
    if first is None or second is None:
        return "-", ""
    change = f"{second / first - 1:+.1%}" if first else ""
    return f"{_number(first)} {_number(second)}", change


def _bar(share: float, cells: int) -> str:
    eighths = round(share * cells * 8)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def _times(found: Percentiles | None) -> str:
    if found is None:
        return "-"
    if 0 < found.count < MIN_PERCENTILE_COUNT:
        return f"{_number(found.p50)} [{_number(found.low)}-{_number(found.high)}]"
    return "/".join(map(_number, (found.p50, found.p90, found.p99)))


def _number(value: float) -> str:
    """Three digits or more."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}"


def _share(share: float | None) -> str:
    return "-" if share is None else percent(share, 1)


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _drafts(found: PointFigures) -> str:
    if found.drafted:
        return f"{found.accepted or 0:,}/{found.drafted:,}"
    return "-"


def _joules(found: PointFigures) -> str:
    if found.joules is None:
        return "-"
    return _number(found.joules / (found.completion_tokens * found.requests))


def _clients(count: int) -> str:
    return f"{count} client{'' if count == 1 else 's'}"


def _mean(values: Iterable[float]) -> float:
    held = list(values)
    return sum(held) / len(held)
