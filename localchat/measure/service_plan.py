"""Plan of a service: copies of a model for a number of users, their waiting, memory, energy and money."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from localchat.config.prices import Prices
from localchat.errors import UsageError
from localchat.fit.memory_plan import MemoryPlan
from localchat.measure.bench_record import BenchRecord
from localchat.measure.capacity import (
    QueueFigures,
    RequestLengths,
    ServerCosts,
    capacity,
    cost_model,
    highest_rate,
    simulate,
    turn_s,
)
from localchat.measure.statistics import LatencyTarget
from localchat.measure.sweep import Point, series
from localchat.units import rate

DEFAULT_SLOTS: Final = 16
_GPU_BUDGET_S = 0.1
_CPU_BUDGET_S = 0.25
"""Time of a step of the engine core that reads prompts too."""
_MOST_LOAD: Final = 0.8
"""Of the capacity, so that a copy has headroom."""
_THOUSAND: Final = 1000
_HOUR_S: Final = 3600.0
_KWH_J: Final = 3.6e6
_MILLION: Final = 1e6
_GUESSED_PREFILL: Final = {True: 40.0, False: 4.0}
"""Prompt tokens that are read in the time of one decoded token, on a GPU and on a CPU."""
_GUESSED_SLOPE: Final = {True: 0.03, False: 0.5}
"""What one more running request adds to a decode step, as a share of it, on a GPU and on a CPU."""


class ServiceDemand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is asked of the service."""

    requests_per_s: float | None = None
    """None: as many as one copy answers."""
    every_s: float = 60.0
    """Time between two requests of one user."""
    prompt_tokens: float
    output_tokens: float
    target: LatencyTarget = LatencyTarget()

    @property
    def users(self) -> float | None:
        """Users who make these requests."""
        if self.requests_per_s is None:
            return None
        return self.requests_per_s * self.every_s


class AnswerCosts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a thousand answers cost. None: the hardware or the prices do not tell."""

    joules: float | None = None
    joules_by_path: dict[str, float] = {}
    """Of `prefill`, `decode`, and within it `wasted drafts`; `saved by prefix hits` is not in the sum."""
    machine_money: float | None = None
    energy_money: float | None = None
    hosted_money: float | None = None
    """Of a hosted API at the given price."""


class ServicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan."""

    model: str
    basis: str
    """Where the costs of a request come from, a phrase."""
    measured: bool
    demand: ServiceDemand
    costs: ServerCosts
    copies: int
    requests_per_s: float
    """Of all copies: what is asked, or else the most that one copy answers within the target."""
    capacity_per_s: float
    """Requests a second of one copy at saturation."""
    running_at_capacity: int
    queue: QueueFigures | None
    """Of one copy; None: no number of copies meets the target."""
    memory_bytes: int | None
    """Of one copy."""
    conversations: int | None
    """Of this length that fit into the memory of one copy at once."""
    price: AnswerCosts

    @property
    def headroom(self) -> float | None:
        """Share of the capacity that is left."""
        return None if self.queue is None else 1 - self.queue.load


class CostSource(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model on a machine."""

    model: str
    basis: str
    costs: ServerCosts
    line: tuple[Point, ...] = ()
    """Empty: nothing was measured."""
    kv_tokens: int | None = None
    """Room in the KV cache."""
    memory_bytes: int | None = None


def measured_source(record: BenchRecord, model: str | None = None) -> CostSource:
    """What a benchmark shows: its first series of this model without context. Raises UsageError."""
    served = {one.variant.name: one for one in record.served}
    for line in series(record.points):
        place = line[0].place
        one = served[place.variant]
        if place.context_tokens or (model is not None and one.variant.model != model):
            continue
        # More clients than slots only wait, so the last number of clients says nothing about slots.
        best = max(line, key=lambda point: point.figures.tokens_per_s)
        usual = DEFAULT_SLOTS if not one.url else best.place.clients
        slots = one.variant.parallel or one.properties.get("total_slots") or usual
        budget_s = _GPU_BUDGET_S if record.machine.gpus else _CPU_BUDGET_S
        kv = [total for point in line if (total := point.figures.kv_total_tokens)]
        return CostSource(
            model=one.model or one.variant.model,
            basis=f"measured: benchmark {record.id} of {record.at[:10]}, shape {place.shape}"
            + (", while other programs used the CPU" if record.disturbed else ""),
            costs=_not_above(cost_model(line, slots, budget_s), line),
            line=tuple(line),
            kv_tokens=max(kv, default=None),
        )
    of = f" of {model}" if model is not None else ""
    raise UsageError(
        f"benchmark {record.id} has no series{of} without context to plan from",
        hint=f"it has {', '.join(record.models)}; localchat bench --list shows the others",
    )


def _not_above(costs: ServerCosts, line: Sequence[Point]) -> ServerCosts:
    """Slow the cost model down until it promises no more than the best measured point."""
    best = max(line, key=lambda point: point.figures.requests_per_s).figures
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


def predicted_source(
    model: str, tokens_per_s: float, plan: MemoryPlan, slots: int, source: str = ""
) -> CostSource:
    """Costs that follow from an estimated decode speed. Rough: nothing was measured under load.

    source: how the speed was found.
    """
    on_gpu = plan.gpu_layers > 0
    step_s = 1 / tokens_per_s
    costs = ServerCosts(
        prefill_s=step_s / _GUESSED_PREFILL[on_gpu],
        steps_s=tuple(
            (count, step_s * (1 + _GUESSED_SLOPE[on_gpu] * (count - 1)))
            for count in range(1, slots + 1)
        ),
        slots=slots,
        budget_s=_GPU_BUDGET_S if on_gpu else _CPU_BUDGET_S,
    )
    return CostSource(
        model=model,
        basis=(
            f"predicted from {rate(tokens_per_s)} ({source or 'an estimate'}); it may be off by a factor "
            "of two, localchat bench measures it"
        ),
        costs=costs,
        kv_tokens=plan.kv_tokens or None,
        memory_bytes=plan.total_bytes,
    )


def make_plan(source: CostSource, demand: ServiceDemand, prices: Prices) -> ServicePlan:
    """Copies, waiting, memory and costs for a demand. Raises UsageError: a copy has no room for one request."""
    lengths = RequestLengths(demand.prompt_tokens, demand.output_tokens)
    length = max(int(demand.prompt_tokens + demand.output_tokens), 1)
    room = None if source.kv_tokens is None else source.kv_tokens // length
    if room == 0:
        raise UsageError(
            f"{source.model}: a request of {length:,} tokens is longer than the KV cache, which holds "
            f"{source.kv_tokens:,}",
            hint="--in and --out are the tokens of a request; --ctx makes room for longer ones",
        )
    if room is not None and room < source.costs.slots:
        costs = msgspec.structs.replace(source.costs, slots=room)
        source = msgspec.structs.replace(source, costs=costs)
    most_of_one = capacity(source.costs, lengths)
    most = highest_rate(source.costs, lengths, demand.target, _MOST_LOAD)
    rate = demand.requests_per_s if demand.requests_per_s is not None else most
    copies = max(math.ceil(rate / most), 1) if most else 0
    queue = simulate(source.costs, lengths, rate / copies) if copies and rate else None
    return ServicePlan(
        model=source.model,
        basis=source.basis,
        measured=bool(source.line),
        demand=demand,
        costs=source.costs,
        copies=copies,
        requests_per_s=rate,
        capacity_per_s=most_of_one.requests_per_s,
        running_at_capacity=most_of_one.running,
        queue=queue,
        memory_bytes=source.memory_bytes,
        conversations=room,
        price=_price(source, lengths, prices, rate / copies if copies else 0.0),
    )


def _price(
    source: CostSource, lengths: RequestLengths, prices: Prices, requests_per_s: float
) -> AnswerCosts:
    """Costs of a thousand answers. requests_per_s: of one copy, which is paid for while it idles too."""
    joules, by_path = _joules(source, lengths)
    answers_per_hour = requests_per_s * _HOUR_S
    machine = prices.machine_hour
    hosted = None
    if prices.hosted_in is not None and prices.hosted_out is not None:
        each = lengths.prompt * prices.hosted_in + lengths.output * prices.hosted_out
        hosted = each / _MILLION * _THOUSAND
    return AnswerCosts(
        joules=joules,
        joules_by_path=by_path,
        machine_money=(
            machine / answers_per_hour * _THOUSAND
            if machine is not None and answers_per_hour
            else None
        ),
        energy_money=None if joules is None or prices.kwh is None else joules / _KWH_J * prices.kwh,
        hosted_money=hosted,
    )


def _joules(source: CostSource, lengths: RequestLengths) -> tuple[float | None, dict[str, float]]:
    """Energy of a thousand answers at the best measured point, by what it is spent on."""
    if not source.line:
        return None, {}
    point = max(source.line, key=lambda one: one.figures.tokens_per_s)
    found = point.figures
    if found.joules is None:
        return None, {}
    watts = found.joules / found.duration_s
    running = min(point.place.clients, source.costs.slots)
    whole = turn_s(source.costs, lengths, running) / running * watts * _THOUSAND
    prefill = lengths.prompt * source.costs.prefill_s * watts * _THOUSAND
    by_path = {"prefill": prefill, "decode": whole - prefill}
    if found.drafted:
        made = found.completion_tokens * found.requests
        wasted = (found.drafted - (found.accepted or 0)) / (made + found.drafted)
        by_path["wasted drafts"] = (whole - prefill) * wasted
    if found.prefix_hits:
        saved = found.prefix_hits * found.prompt_tokens * source.costs.prefill_s
        by_path["saved by prefix hits"] = saved * watts * _THOUSAND
    return whole, by_path


def parse_price(word: str, known: Mapping[str, float | str | None]) -> tuple[str, float]:
    """`kwh=0.30` as a name and a number. Raises UsageError."""
    name, equals, text = word.partition("=")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if name.strip() not in known or not equals or not 0 <= value < float("inf"):
        raise UsageError(
            f"--price {word}: it is no price",
            hint=f"use one of {', '.join(known)}, as --price kwh=0.30",
        )
    return name.strip(), value
