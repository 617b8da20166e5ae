"""Capacity of a served model: cost of a request, requests that fit in time, and their waiting.

A request costs the prefill of its prompt, which requests take one after the other, and its share of decode
steps, which all running requests take together. Both costs come from the points of a benchmark. Waiting comes
from a simulation of requests that arrive at random.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from localchat.measure.statistics import LatencyTarget, Percentiles, percentiles
from localchat.measure.sweep import Point

_REQUESTS: Final = 4000
"""Requests of a simulation. The first fifth arrives at an empty server and is not counted."""
_MIN_TIME_S: Final = 1e-6
"""Lower bound of a fitted time, which noise could make negative."""
MIN_CHUNK: Final = 32
"""Smallest prompt chunk of a step with waiting prompts, as in the engine's scheduler."""
_ROUNDING_TOKENS: Final = 1e-6
"""Rest of a prompt that is a rounding error."""
_NEARLY: Final = 0.95
_PRECISION: Final = 0.02
_MAX_LOAD: Final = 0.98
"""Load limit as a share of capacity. Above it, a short simulation cannot estimate the queue length."""


class ServerCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Time that a server needs for tokens."""

    prefill_s: float
    """Time per prompt token."""
    steps_s: tuple[tuple[int, float], ...]
    """Running requests and the time of a decode step with them, rising."""
    slots: int
    """Requests that run at once. Others wait."""
    budget_s: float
    """Longest step that decodes and reads a prompt."""
    overhead_s: float = 0.0
    """Time per request before its prefill. It delays other waiting requests, but not decoding ones."""

    def step_s(self, running: int) -> float:
        """Return the time of a decode step, interpolated between measured points.

        A sweep ends when more clients add no throughput, so beyond its last point requests share the throughput
        of that point.
        """
        first, first_s = self.steps_s[0]
        last, last_s = self.steps_s[-1]
        if running <= first:
            return first_s
        if running >= last:
            return last_s * running / last
        upper = next(i for i, (count, _) in enumerate(self.steps_s) if count >= running)
        (low, low_s), (high, high_s) = self.steps_s[upper - 1 : upper + 1]
        return low_s + (high_s - low_s) * (running - low) / (high - low)


class RequestLengths(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    prompt: float
    """Prompt tokens to compute, without those from the prefix cache."""
    output: float


def cost_model(series: Sequence[Point], slots: int, budget_s: float) -> ServerCosts:
    """Fit the costs to a series of points.

    The time between two answers of a client goes to the steps of its answer, to its overhead, and to the
    prompts of all clients, one after the other. The TTFT of one client is overhead and prompt together. What
    more clients add to it is their prompts.
    """
    within = [point for point in series if point.key.clients <= slots] or [series[0]]
    first = within[0]
    clients = first.key.clients
    wait_s = max(first.figures.ttft_ms.p50 / 1e3 - _step_s(first), _MIN_TIME_S)
    # If prompts fill most pauses, the median pause is too long and the rest too short. So the largest counts.
    prompts_s = [
        (_turn_s(point) - _step_s(point) * point.figures.completion_tokens - wait_s)
        / ((point.key.clients - clients) * max(_computed_tokens(point), 1.0))
        for point in within[1:]
    ]
    alone_s = wait_s / max(_computed_tokens(first), 1.0) / clients
    prefill_s = max(min(max(prompts_s, default=alone_s), alone_s), _MIN_TIME_S)
    overhead_s = max(wait_s - clients * prefill_s * _computed_tokens(first), 0.0)
    steps: list[tuple[int, float]] = []
    min_step_s = _MIN_TIME_S
    for point in within:
        read_s = point.key.clients * prefill_s * _computed_tokens(point) + overhead_s
        max_step_s = (_turn_s(point) - read_s) / max(point.figures.completion_tokens, 1.0)
        # A step with more requests is never shorter, whatever the noise suggests.
        min_step_s = max(min(_step_s(point), max_step_s), min_step_s)
        steps.append((point.key.clients, min_step_s))
    return ServerCosts(
        prefill_s=prefill_s,
        steps_s=tuple(steps),
        slots=slots,
        budget_s=budget_s,
        overhead_s=overhead_s,
    )


def _turn_s(point: Point) -> float:
    """Return the time between two answers of one client."""
    return point.key.clients / point.figures.requests_per_s


def _step_s(point: Point) -> float:
    """Return the time of a decode step per token."""
    figures = point.figures
    step_ms = 0.0
    if figures.step_ms is not None:
        step_ms = figures.step_ms
    elif figures.tpot_ms is not None:
        step_ms = figures.tpot_ms.p50
    return max(step_ms / 1e3, _MIN_TIME_S)


def _computed_tokens(point: Point) -> float:
    """Return the prompt tokens that miss the prefix cache."""
    return point.figures.prompt_tokens * (1 - (point.figures.prefix_hits or 0.0))


def turn_s(costs: ServerCosts, lengths: RequestLengths, running: int) -> float:
    """Return the time in which each of the running requests is answered once."""
    prefill_s = running * lengths.prompt * costs.prefill_s
    return prefill_s + lengths.output * costs.step_s(running)


class Capacity(NamedTuple):
    """Throughput of a server while requests wait."""

    requests_per_s: float
    running: int
    """Smallest number of running requests that reaches nearly this throughput."""


def capacity(costs: ServerCosts, lengths: RequestLengths) -> Capacity:
    """Return the throughput with all slots taken. At a higher rate the queue grows forever."""

    def rate(running: int) -> float:
        return running / turn_s(costs, lengths, running)

    max_rate = rate(costs.slots)
    if costs.overhead_s:
        max_rate = min(max_rate, 1 / costs.overhead_s)
    enough = max_rate * _NEARLY
    running = next(count for count in range(1, costs.slots + 1) if rate(count) >= enough)
    return Capacity(max_rate, running)


class QueueFigures(msgspec.Struct, frozen=True):
    """Times of requests that arrive at random."""

    ttft_ms: Percentiles
    ttft_p95_ms: float
    tpot_ms: Percentiles
    tpot_p95_ms: float
    running: float
    """Mean number of requests in the server, including waiting ones."""
    load: float
    """Arrival rate as a share of the capacity."""

    def meets(self, target: LatencyTarget) -> bool:
        """Return True if 95 of 100 requests are within the target."""
        return target.is_met(self.ttft_p95_ms, self.tpot_p95_ms)


@dataclass(slots=True)
class SimulatedRequest:
    """A request with its times on the clock of a simulation."""

    arrived_s: float
    left_tokens: float = 0.0
    """Prompt tokens still to read."""
    first_s: float = 0.0
    """Time of the first token."""
    ended_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_s - self.arrived_s


@dataclass(slots=True)
class _Simulation:
    """A server that goes from step to step. A request that arrives within a step waits for its end."""

    costs: ServerCosts
    lengths: RequestLengths
    now_s: float = 0.0
    steps: int = 0
    """Steps that decoded a token of each running request."""
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    reading: deque[SimulatedRequest] = field(default_factory=deque)
    """Requests whose prompt is being read."""
    running: list[tuple[int, int, SimulatedRequest]] = field(default_factory=list)
    """Heap of (value of `steps` at which the request ends, order of arrival, request)."""
    started: int = 0

    def advance(self, arrival_s: float) -> int:
        """Run until a request ends or the next one arrives. Return the requests that ended."""
        while self.waiting and len(self.running) + len(self.reading) < self.costs.slots:
            self.reading.append(self.waiting.popleft())
        if self.reading:
            return self._step_with_prompts()
        if not self.running:
            self.now_s = max(self.now_s, arrival_s)
            return 0
        step_s = self.costs.step_s(len(self.running))
        steps = self.running[0][0] - self.steps
        if arrival_s - self.now_s < steps * step_s:
            steps = max(math.ceil((arrival_s - self.now_s) / step_s), 1)
        self.now_s += steps * step_s
        self.steps += steps
        return self._end_finished()

    def arrive(self, arrived_s: float) -> SimulatedRequest:
        """Queue a request that arrived at this time, after its overhead."""
        self.waiting.append(SimulatedRequest(arrived_s, self.lengths.prompt))
        return self.waiting[-1]

    def _step_with_prompts(self) -> int:
        """Run a step that decodes, and reads as many prompts as its time allows."""
        decode_s = self.costs.step_s(len(self.running)) if self.running else 0.0
        room_s = max(self.costs.budget_s - decode_s, MIN_CHUNK * self.costs.prefill_s)
        left_s = room_s
        complete = []
        while self.reading and left_s > 0:
            request = self.reading[0]
            read_s = min(request.left_tokens * self.costs.prefill_s, left_s)
            left_s -= read_s
            request.left_tokens -= read_s / self.costs.prefill_s
            if request.left_tokens > _ROUNDING_TOKENS:
                break
            complete.append(self.reading.popleft())
        if complete and not self.running:
            # A first token needs all weights too.
            decode_s = self.costs.step_s(1)
        self.now_s += decode_s + room_s - left_s
        if self.running:
            self.steps += 1
        ended = self._end_finished()
        more_tokens = max(round(self.lengths.output) - 1, 0)
        for request in complete:
            request.first_s = self.now_s
            self.started += 1
            heapq.heappush(self.running, (self.steps + more_tokens, self.started, request))
        return ended + self._end_finished()

    def _end_finished(self) -> int:
        """Remove the requests whose last token was decoded. Return their number."""
        count = 0
        while self.running and self.running[0][0] <= self.steps:
            heapq.heappop(self.running)[2].ended_s = self.now_s
            count += 1
        return count


def simulate(
    costs: ServerCosts, lengths: RequestLengths, requests_per_s: float, *, requests: int = _REQUESTS
) -> QueueFigures | None:
    """Return the times of requests that arrive at random; None if they exceed the capacity."""
    simulated = simulated_requests(costs, lengths, requests_per_s, requests=requests)
    if simulated is None:
        return None
    counted = simulated[requests // 5 :]
    ttfts = [request.ttft_s for request in counted]
    more_tokens = max(lengths.output - 1, 1.0)
    tpots = [(request.ended_s - request.first_s) / more_tokens for request in counted]
    busy_s = sum(request.ended_s - request.arrived_s for request in simulated)
    return QueueFigures(
        percentiles(ttfts),
        _p95_ms(ttfts),
        percentiles(tpots),
        _p95_ms(tpots),
        running=busy_s / max(request.ended_s for request in simulated),
        load=requests_per_s / capacity(costs, lengths).requests_per_s,
    )


def simulated_requests(
    costs: ServerCosts,
    lengths: RequestLengths,
    requests_per_s: float,
    *,
    requests: int = _REQUESTS,
    seed: int = 0,
) -> list[SimulatedRequest] | None:
    """Return the requests of a simulation in their order of arrival; None as for `simulate`.

    Intervals are drawn by `expovariate(requests_per_s)` of `random.Random(seed)`.
    """
    if requests_per_s / capacity(costs, lengths).requests_per_s >= _MAX_LOAD:
        return None
    draw = random.Random(seed)
    server = _Simulation(costs, lengths)
    arrival_s = draw.expovariate(requests_per_s)
    # Overheads follow one another, so that a request is ready after all earlier ones.
    ready_s = arrival_s + costs.overhead_s
    ended = 0
    simulated: list[SimulatedRequest] = []
    while ended < requests:
        while len(simulated) < requests and ready_s <= server.now_s:
            simulated.append(server.arrive(arrival_s))
            arrival_s += draw.expovariate(requests_per_s)
            ready_s = max(arrival_s, ready_s) + costs.overhead_s
        ended += server.advance(ready_s if len(simulated) < requests else float("inf"))
    return simulated


def _p95_ms(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) * 95 // 100, len(seconds) - 1)] * 1e3


def highest_rate(
    costs: ServerCosts, lengths: RequestLengths, target: LatencyTarget, max_load: float
) -> float:
    """Return the highest rate of one server within the target; 0 if single requests miss it."""

    def meets(requests_per_s: float) -> bool:
        queue = simulate(costs, lengths, requests_per_s)
        return queue is not None and queue.meets(target)

    full_rate = capacity(costs, lengths).requests_per_s
    high = full_rate * min(max_load, _MAX_LOAD)
    if meets(high * 0.999):
        return high
    low = 0.0
    while high - low > high * _PRECISION:
        middle = (low + high) / 2
        if meets(middle):
            low = middle
        else:
            high = middle
        if high < full_rate * 1e-3:
            return 0.0
    return low
