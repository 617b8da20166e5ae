"""Names the limit of a measured server, and the targets that it missed."""

from collections.abc import Iterator, Sequence
from typing import Final

from localchat.measure.bench_record import BenchRecord
from localchat.measure.sweep import Point, saturation
from localchat.units import counted, tokens

_GOOD_SHARE: Final = 0.99
"""Share of the requests that must meet a target."""
_AT_ROOF: Final = 0.7
"""Share of the memory bandwidth from which it is the limit."""


def limit_sentences(record: BenchRecord, line: Sequence[Point]) -> Iterator[str]:
    """Name the limit of a series: KV cache, slots, bandwidth or compute. Nothing while it still rises."""
    point = line[-1]
    waiting = _kv_limit(point) or _slot_limit(record, point)
    if waiting:
        yield waiting
        return
    saturated = saturation(list(line))
    if saturated is None or not saturated.reached:
        return
    best = max(line, key=lambda point: point.figures.tokens_per_s)
    share = best.figures.roof_share
    if share is None or not best.figures.kv_total_tokens:
        return
    if share >= _AT_ROOF:
        yield (
            f"The limit is the memory bandwidth: {share:.0%} is in use. A smaller quantization reads less."
        )
    else:
        yield (
            "The limit is compute: KV cache and slots have room. More cores (--threads), a GPU or a smaller "
            "model raise it."
        )


def _kv_limit(point: Point) -> str:
    """Report a KV cache without room for all clients; empty if it has room."""
    figures = point.figures
    clients = point.place.clients
    total = figures.kv_total_tokens
    length = figures.prompt_tokens + figures.completion_tokens + point.place.context_tokens
    if not total or length < 1:
        return ""
    room = int(total // length)
    if room >= clients:
        return ""
    return (
        f"The limit is the KV cache: its {tokens(total)} have room for {counted(room, 'request')} of "
        f"{length:,.0f} tokens, and {clients - room} of {clients} clients wait for it. A larger --parallel, "
        "--ctx or --kv-gb raises it."
    )


def _slot_limit(record: BenchRecord, point: Point) -> str:
    """Report more clients than slots; empty if there are none, or the slots are unknown."""
    name = point.place.variant
    served = next((entry for entry in record.served if entry.variant.name == name), None)
    if served is None:
        return ""
    slots = served.variant.parallel or served.properties.get("total_slots")
    clients = point.place.clients
    if not isinstance(slots, int) or clients <= slots:
        return ""
    return (
        f"The limit is the number of slots: the server computes {counted(slots, 'request')} at once, and "
        f"{clients - slots} of {clients} clients wait. --parallel {clients} raises it."
    )


def missed_targets(record: BenchRecord) -> list[str]:
    """Sentences on points where requests missed the targets of --ttft and --tpot.

    Named numbers of clients must all meet them; a sweep goes on until they are missed, so its first point must.
    """
    missed = []
    points = record.points
    if not record.spec.clients:
        first = min((point.place.clients for point in points), default=0)
        points = tuple(point for point in points if point.place.clients == first)
    for point in points:
        share = point.figures.good_share
        if share is not None and share < _GOOD_SHARE:
            missed.append(
                f"target missed: {point.place.variant}, {counted(point.place.clients, 'client')}: "
                f"{share:.0%} of the requests met it"
            )
    return missed
