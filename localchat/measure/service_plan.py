"""Plan of a service: the copies of a model that a number of users need, and their cost.

It follows from one measured point of a benchmark, the one with the most requests per second within the target.
"""

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from localchat.config.prices import Prices
from localchat.errors import UsageError
from localchat.measure.records import BenchRecord
from localchat.measure.statistics import LatencyTarget, Percentiles, PointFigures
from localchat.measure.sweep import Point, point_series

_MAX_LOAD: Final = 0.8
"""Planned load as a share of the measured one, which leaves headroom."""
_THOUSAND: Final = 1000
_HOUR_S: Final = 3600.0
_MILLION: Final = 1e6


class ServiceDemand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests that the service has to answer."""

    requests_per_s: float | None = None
    """Rate of all users; None for as many as one copy can answer."""
    every_s: float = 60.0
    """Time between two requests of one user."""
    target: LatencyTarget = LatencyTarget()


class AnswerCosts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Costs of a thousand answers. None without a price."""

    machine_money: float | None = None
    hosted_money: float | None = None
    """Costs of a hosted API at the given prices."""


class MeasuredLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one copy that meets the target, as it was measured."""

    load: str
    """`8 clients`, or `2.5 requests/s`."""
    requests_per_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles | None


class ServicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan for one model."""

    model: str
    basis: str
    """Benchmark of the plan, as messages show it."""
    demand: ServiceDemand
    prompt_tokens: float
    """Mean prompt length of the benchmark."""
    output_tokens: float
    """Mean answer length of the benchmark."""
    copies: int
    """Number of copies; 0 if no number of copies meets the target."""
    requests_per_s: float
    """Rate of all copies: the demand, or the most that is planned for one copy."""
    measured: MeasuredLoad | None
    """Measured load of one copy. None if no number of copies meets the target."""
    share: float
    """Planned rate of one copy as a share of the measured one."""
    conversations: int | None
    """Requests of this length that fit in the KV cache of one copy. None if unknown."""
    price: AnswerCosts


def make_plan(
    record: BenchRecord, model: str | None, demand: ServiceDemand, prices: Prices
) -> ServicePlan:
    """Plan copies and costs for a demand.

    The basis is the first series of the model in a benchmark. Raises UsageError if there is no such series.
    """
    series = _series(record, model)
    served = next(
        served for served in record.served if served.variant.name == series[0].key.variant
    )
    basis = f"measured: benchmark {record.id} of {record.at[:10]}, shape {series[0].key.shape}"
    if record.disturbed:
        basis += ", while other programs used the CPU"
    fitting = [point for point in series if _meets(point.figures, demand.target)]
    best = max(fitting or series, key=lambda point: point.figures.requests_per_s)
    figures = best.figures
    planned_rate = figures.requests_per_s * _MAX_LOAD
    total_rate = 0.0
    copies = 0
    if fitting:
        total_rate = planned_rate if demand.requests_per_s is None else demand.requests_per_s
        copies = max(math.ceil(total_rate / planned_rate), 1)
    copy_rate = total_rate / max(copies, 1)
    measured = MeasuredLoad(
        load=best.key.load,
        requests_per_s=figures.requests_per_s,
        ttft_ms=figures.ttft_ms,
        tpot_ms=figures.tpot_ms,
    )
    length = max(figures.prompt_tokens + figures.completion_tokens, 1)
    conversations = None
    if kv_totals := [total for point in series if (total := point.figures.kv_total_tokens)]:
        conversations = int(max(kv_totals) / length)
    return ServicePlan(
        model=served.model or served.variant.model,
        basis=basis,
        demand=demand,
        prompt_tokens=figures.prompt_tokens,
        output_tokens=figures.completion_tokens,
        copies=copies,
        requests_per_s=total_rate,
        measured=measured if fitting else None,
        share=copy_rate / figures.requests_per_s,
        conversations=conversations,
        price=_price(figures, prices, copy_rate),
    )


def _series(record: BenchRecord, model: str | None) -> list[Point]:
    """Return the first series of a model without a burst. Raises UsageError."""
    models = {served.variant.name: served.variant.model for served in record.served}
    for series in point_series(record.points):
        first = series[0]
        if first.figures.disruption is None and model in (None, models[first.key.variant]):
            return series
    subject = "" if model is None else f" of {model}"
    raise UsageError(
        f"benchmark {record.id} has no series{subject} to plan from",
        hint=f"it has {', '.join(record.models)}",
    )


def p95_ms(times: Percentiles) -> float:
    """Return the 95th percentile. Old records have the 90th instead."""
    return times.p95 or times.p90


def _meets(figures: PointFigures, target: LatencyTarget) -> bool:
    """Return True if 95 of 100 requests of a point were within the target."""
    tpot_ms = None
    if figures.tpot_ms is not None:
        tpot_ms = p95_ms(figures.tpot_ms)
    return target.is_met(p95_ms(figures.ttft_ms), tpot_ms)


def _price(figures: PointFigures, prices: Prices, copy_rate: float) -> AnswerCosts:
    """Return the costs of a thousand answers. A copy costs money while it idles too."""
    machine_money = None
    hosted_money = None
    if prices.machine_hour is not None and copy_rate:
        machine_money = prices.machine_hour / (copy_rate * _HOUR_S) * _THOUSAND
    if prices.hosted_in is not None and prices.hosted_out is not None:
        prompt_money = figures.prompt_tokens * prices.hosted_in
        output_money = figures.completion_tokens * prices.hosted_out
        hosted_money = (prompt_money + output_money) / _MILLION * _THOUSAND
    return AnswerCosts(machine_money=machine_money, hosted_money=hosted_money)


def parse_price(argument: str, names: Mapping[str, float | str | None]) -> tuple[str, float]:
    """Parse `machine_hour=1.20` as a name and a number. Raises UsageError."""
    name, equals, text = argument.partition("=")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if name.strip() not in names or not equals or not 0 <= value < float("inf"):
        raise UsageError(
            f"--price {argument} is not a price",
            hint=f"use one of {', '.join(names)}, as --price machine_hour=1.20",
        )
    return name.strip(), value
