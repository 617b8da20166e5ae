"""Plan of a service: copies of a model for a number of users, their waiting and money."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from localchat.config.prices import Prices
from localchat.errors import UsageError
from localchat.measure.capacity import (
    QueueFigures,
    RequestLengths,
    ServerCosts,
    capacity,
    cost_model,
    highest_rate,
    simulate,
)
from localchat.measure.records import BenchRecord
from localchat.measure.statistics import LatencyTarget
from localchat.measure.sweep import Point, point_series

DEFAULT_SLOTS: Final = 16
_GPU_BUDGET_S: Final = 0.1
_CPU_BUDGET_S: Final = 0.25
"""Time budget of an engine step that reads prompts too."""
_MAX_LOAD: Final = 0.8
"""Planned load as a share of capacity, which leaves headroom."""
_THOUSAND: Final = 1000
_HOUR_S: Final = 3600.0
_MILLION: Final = 1e6


class ServiceDemand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests that the service has to answer."""

    requests_per_s: float | None = None
    """Rate of all users; None for as many as one copy can answer."""
    every_s: float = 60.0
    """Time between two requests of one user."""
    prompt_tokens: float
    output_tokens: float
    target: LatencyTarget = LatencyTarget()


class AnswerCosts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Costs of a thousand answers. None without a price."""

    machine_money: float | None = None
    hosted_money: float | None = None
    """Costs of a hosted API at the given prices."""


class ServicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan for one model."""

    model: str
    basis: str
    """Source of the costs of a request, as messages show it."""
    demand: ServiceDemand
    costs: ServerCosts
    copies: int
    """Number of copies; 0 if no number of copies meets the target."""
    requests_per_s: float
    """Rate of all copies: the demand, or the most that one copy answers within the target."""
    capacity_per_s: float
    """Requests per second of one copy at saturation."""
    running_at_capacity: int
    queue: QueueFigures | None
    """Times at one copy; None if no number of copies meets the target."""
    conversations: int | None
    """Conversations of this length that fit in the KV cache of one copy."""
    price: AnswerCosts

    @property
    def headroom(self) -> float | None:
        """Free share of the capacity."""
        if self.queue is None:
            return None
        return 1 - self.queue.load


class CostSource(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a model on a machine, from a benchmark."""

    model: str
    basis: str
    costs: ServerCosts
    kv_tokens: int | None = None
    """Size of the KV cache."""


def measured_source(record: BenchRecord, model: str | None = None) -> CostSource:
    """Return the costs from a benchmark: its first series of the model without context.

    Raises UsageError if there is no such series.
    """
    served_by_name = {served.variant.name: served for served in record.served}
    for series in point_series(record.points):
        key = series[0].key
        served = served_by_name[key.variant]
        is_closed_loop = key.clients and series[0].figures.disruption is None
        if (
            not is_closed_loop
            or key.context_tokens
            or (model is not None and served.variant.model != model)
        ):
            continue
        # More clients than slots only wait, so the last number of clients does not show the slots.
        best = max(series, key=lambda point: point.figures.tokens_per_s)
        usual_slots = best.key.clients if served.url else DEFAULT_SLOTS
        slots = served.variant.parallel or served.properties.get("total_slots") or usual_slots
        budget_s = _GPU_BUDGET_S if record.machine.gpus else _CPU_BUDGET_S
        basis = f"measured: benchmark {record.id} of {record.at[:10]}, shape {key.shape}"
        if record.disturbed:
            basis += ", while other programs used the CPU"
        kv_totals = [total for point in series if (total := point.figures.kv_total_tokens)]
        return CostSource(
            model=served.model or served.variant.model,
            basis=basis,
            costs=_capped(cost_model(series, slots, budget_s), series),
            kv_tokens=max(kv_totals, default=None),
        )
    subject = "" if model is None else f" of {model}"
    raise UsageError(
        f"benchmark {record.id} has no series{subject} without context to plan from",
        hint=f"it has {', '.join(record.models)}; localchat bench --list shows the others",
    )


def _capped(costs: ServerCosts, series: Sequence[Point]) -> ServerCosts:
    """Slow a cost model down until it promises no more than the best measured point."""
    best = max(series, key=lambda point: point.figures.requests_per_s).figures
    lengths = RequestLengths(best.prompt_tokens, best.completion_tokens)
    promised = capacity(costs, lengths).requests_per_s
    if promised <= best.requests_per_s or not best.requests_per_s:
        return costs
    factor = promised / best.requests_per_s
    return msgspec.structs.replace(
        costs,
        prefill_s=costs.prefill_s * factor,
        overhead_s=costs.overhead_s * factor,
        steps_s=tuple((count, step_s * factor) for count, step_s in costs.steps_s),
    )


def make_plan(source: CostSource, demand: ServiceDemand, prices: Prices) -> ServicePlan:
    """Plan copies, waiting and costs for a demand.

    Raises UsageError if the KV cache of a copy is too small for one request.
    """
    lengths = RequestLengths(demand.prompt_tokens, demand.output_tokens)
    length = max(int(demand.prompt_tokens + demand.output_tokens), 1)
    conversations = None
    if source.kv_tokens is not None:
        conversations = source.kv_tokens // length
        if conversations == 0:
            raise UsageError(
                f"{source.model}: a request of {length:,} tokens is longer than the KV cache, which holds "
                f"{source.kv_tokens:,}",
                hint="--in and --out are the tokens of a request; --ctx makes room for longer ones",
            )
        slots = min(source.costs.slots, conversations)
        costs = msgspec.structs.replace(source.costs, slots=slots)
        source = msgspec.structs.replace(source, costs=costs)
    saturated = capacity(source.costs, lengths)
    max_rate = highest_rate(source.costs, lengths, demand.target, _MAX_LOAD)
    total_rate = max_rate if demand.requests_per_s is None else demand.requests_per_s
    copies = 0
    copy_rate = 0.0
    if max_rate:
        copies = max(math.ceil(total_rate / max_rate), 1)
        copy_rate = total_rate / copies
    return ServicePlan(
        model=source.model,
        basis=source.basis,
        demand=demand,
        costs=source.costs,
        copies=copies,
        requests_per_s=total_rate,
        capacity_per_s=saturated.requests_per_s,
        running_at_capacity=saturated.running,
        queue=simulate(source.costs, lengths, copy_rate) if copy_rate else None,
        conversations=conversations,
        price=_price(lengths, prices, copy_rate),
    )


def _price(lengths: RequestLengths, prices: Prices, copy_rate: float) -> AnswerCosts:
    """Return the costs of a thousand answers. A copy costs money while it idles too."""
    machine_money = None
    hosted_money = None
    if prices.machine_hour is not None and copy_rate:
        machine_money = prices.machine_hour / (copy_rate * _HOUR_S) * _THOUSAND
    if prices.hosted_in is not None and prices.hosted_out is not None:
        per_million = lengths.prompt * prices.hosted_in + lengths.output * prices.hosted_out
        hosted_money = per_million / _MILLION * _THOUSAND
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
