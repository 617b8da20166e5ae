"""Capacity of a served model: what a request costs, how many fit in time, and how long they wait.

A request costs the prefill of its prompt, which requests take one after the other, and its share of decode
steps, which all running requests take together. Both costs come from the points of a benchmark; waiting comes
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
"""Of a simulation; the first fifth finds the server empty and does not count."""
_LEAST_PREFILL_S: Final = 1e-6
LEAST_CHUNK: Final = 32
"""Tokens of waiting prompts that a step reads at least, as the engine's scheduler has it."""
_NO_TOKENS: Final = 1e-6
"""Left of a prompt by rounding."""
_NEARLY: Final = 0.95
_PRECISION: Final = 0.02
_MOST_LOAD: Final = 0.98
"""Of the capacity: above, a queue has no length that a short simulation could find."""


class ServerCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Time that a server needs for tokens."""

    prefill_s: float
    """Of one prompt token."""
    steps_s: tuple[tuple[int, float], ...]
    """Running requests and the time of a decode step with them, rising."""
    slots: int
    """Requests that run at once; others wait."""
    budget_s: float
    """The longest step that decodes and reads a prompt."""
    overhead_s: float = 0.0
    """Of each request before its prompt is read: requests pass one after the other, while others decode."""

    def step_s(self, running: int) -> float:
        """Time of a decode step: between two known points on a line. Beyond the last one, where a sweep ends
        because more clients bring no more, requests share the throughput that was reached."""
        (first, first_s), (last, last_s) = self.steps_s[0], self.steps_s[-1]
        if running <= first:
            return first_s
        if running >= last:
            return last_s * running / last
        at = next(i for i, (count, _) in enumerate(self.steps_s) if count >= running)
        (low, low_s), (high, high_s) = self.steps_s[at - 1], self.steps_s[at]
        return low_s + (high_s - low_s) * (running - low) / (high - low)


class RequestLengths(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    prompt: float
    """To compute: without what the prefix cache holds."""
    output: float


def cost_model(line: Sequence[Point], slots: int, budget_s: float) -> ServerCosts:
    """The costs that a series of points shows.

    The time from answer to answer of one client goes to the steps of its answer, to its overhead, and to the
    prompts of all clients, one after the other. The TTFT of one client tells overhead and prompt together;
    what more clients add to it are their prompts."""
    within = [one for one in line if one.place.clients <= slots] or [line[0]]
    first = within[0]
    clients = first.place.clients
    wait_s = max(first.figures.ttft_ms.p50 / 1e3 - _step_s(first), _LEAST_PREFILL_S)
    # Prompts that fill most pauses make a median pause too long and the rest too short: the most counts.
    rests = [
        (_turn_s(point) - _step_s(point) * point.figures.completion_tokens - wait_s)
        / ((point.place.clients - clients) * max(_computed(point), 1.0))
        for point in within[1:]
    ]
    alone_s = wait_s / max(_computed(first), 1.0) / clients
    prefill_s = max(min(max(rests, default=alone_s), alone_s), _LEAST_PREFILL_S)
    overhead_s = max(wait_s - clients * prefill_s * _computed(first), 0.0)
    steps: list[tuple[int, float]] = []
    for point in within:
        read_s = point.place.clients * prefill_s * _computed(point) + overhead_s
        most_s = (_turn_s(point) - read_s) / max(point.figures.completion_tokens, 1.0)
        # A step of more requests is never shorter, whatever the noise says.
        least_s = steps[-1][1] if steps else _LEAST_PREFILL_S
        steps.append((point.place.clients, max(min(_step_s(point), most_s), least_s)))
    return ServerCosts(
        prefill_s=prefill_s,
        steps_s=tuple(steps),
        slots=slots,
        budget_s=budget_s,
        overhead_s=overhead_s,
    )


def _turn_s(point: Point) -> float:
    """Time from answer to answer of one client."""
    return point.place.clients / point.figures.requests_per_s


def _step_s(point: Point) -> float:
    """Time of a decode step for each token that it gives."""
    found = point.figures
    if found.step_ms is not None:
        return max(found.step_ms / 1e3, _LEAST_PREFILL_S)
    return max(found.tpot_ms.p50 / 1e3 if found.tpot_ms else 0.0, _LEAST_PREFILL_S)


def _computed(point: Point) -> float:
    """Tokens of a prompt that the prefix cache does not hold."""
    found = point.figures
    return found.prompt_tokens * (1 - (found.prefix_hits or 0.0))


def turn_s(costs: ServerCosts, lengths: RequestLengths, running: int) -> float:
    """Time in which each of so many running requests is answered once."""
    prefill_s = running * lengths.prompt * costs.prefill_s
    return prefill_s + lengths.output * costs.step_s(running)


class Capacity(NamedTuple):
    """What a server answers while requests wait."""

    requests_per_s: float
    running: int
    """The least number of running requests that reaches nearly as much."""


def capacity(costs: ServerCosts, lengths: RequestLengths) -> Capacity:
    """The requests a second of a server whose slots are all taken: more make the queue grow forever."""

    def rate(running: int) -> float:
        return running / turn_s(costs, lengths, running)

    most = rate(costs.slots)
    if costs.overhead_s:
        most = min(most, 1 / costs.overhead_s)
    running = next(count for count in range(1, costs.slots + 1) if rate(count) >= most * _NEARLY)
    return Capacity(most, running)


class QueueFigures(msgspec.Struct, frozen=True):
    """What requests that arrive at random meet."""

    ttft_ms: Percentiles
    ttft_p95_ms: float
    tpot_ms: Percentiles
    tpot_p95_ms: float
    running: float
    """Requests in the server, on average, those that wait included."""
    load: float
    """Share of the requests a second at saturation."""

    def meets(self, target: LatencyTarget) -> bool:
        """Whether 95 of 100 requests keep to the target."""
        late = target.ttft_ms is not None and self.ttft_p95_ms > target.ttft_ms
        slow = target.tpot_ms is not None and self.tpot_p95_ms > target.tpot_ms
        return not late and not slow


@dataclass(slots=True)
class SimulatedRequest:
    """A request with its times, of a simulation's clock."""

    arrived_s: float
    left_tokens: float = 0.0
    """Of its prompt."""
    first_s: float = 0.0
    ended_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """From its arrival to its first token."""
        return self.first_s - self.arrived_s


@dataclass(slots=True)
class _Simulation:
    """A server that goes from step to step: a request that comes within one waits for its end."""

    costs: ServerCosts
    lengths: RequestLengths
    now_s: float = 0.0
    steps: int = 0
    """That have decoded a token of each running request."""
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    prompts: deque[SimulatedRequest] = field(default_factory=deque)
    running: list[tuple[int, int, SimulatedRequest]] = field(default_factory=list)
    """By the value of `steps` at which they end."""
    count: int = 0

    def advance(self, arrival_s: float) -> int:
        """Take a step, or all until a request ends or the next comes. Returns how many requests ended."""
        self._admit()
        if self.prompts:
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
        return self._end()

    def arrive(self, arrived_s: float) -> SimulatedRequest:
        """A request is ready to be read. arrived_s: when it came."""
        self.waiting.append(SimulatedRequest(arrived_s, self.lengths.prompt))
        return self.waiting[-1]

    def _admit(self) -> None:
        while self.waiting and len(self.running) + len(self.prompts) < self.costs.slots:
            self.prompts.append(self.waiting.popleft())

    def _step_with_prompts(self) -> int:
        """One step that decodes, and reads as many prompts as its time allows."""
        decode_s = self.costs.step_s(len(self.running)) if self.running else 0.0
        room_s = max(self.costs.budget_s - decode_s, LEAST_CHUNK * self.costs.prefill_s)
        left_s = room_s
        read = []
        while self.prompts and left_s > 0:
            one = self.prompts[0]
            taken_s = min(one.left_tokens * self.costs.prefill_s, left_s)
            left_s -= taken_s
            one.left_tokens -= taken_s / self.costs.prefill_s
            if one.left_tokens > _NO_TOKENS:
                break
            read.append(self.prompts.popleft())
        if read and not self.running:
            decode_s = self.costs.step_s(1)  # the weights are read for a first token too
        self.now_s += decode_s + room_s - left_s
        if self.running:
            self.steps += 1
        ended = self._end()
        for one in read:
            one.first_s = self.now_s
            self.count += 1
            more = max(round(self.lengths.output) - 1, 0)
            heapq.heappush(self.running, (self.steps + more, self.count, one))
        return ended + self._end()

    def _end(self) -> int:
        count = 0
        while self.running and self.running[0][0] <= self.steps:
            heapq.heappop(self.running)[2].ended_s = self.now_s
            count += 1
        return count


def simulate(
    costs: ServerCosts, lengths: RequestLengths, requests_per_s: float, *, requests: int = _REQUESTS
) -> QueueFigures | None:
    """Times of requests that arrive at random at one server; None where they come faster than it answers."""
    found = simulated_requests(costs, lengths, requests_per_s, requests=requests)
    if found is None:
        return None
    counted = found[requests // 5 :]
    ttft = [one.ttft_s for one in counted]
    more = max(lengths.output - 1, 1.0)
    tpot = [(one.ended_s - one.first_s) / more for one in counted]
    held_s = sum(one.ended_s - one.arrived_s for one in found)
    return QueueFigures(
        percentiles(ttft),
        _p95(ttft),
        percentiles(tpot),
        _p95(tpot),
        held_s / max(one.ended_s for one in found),
        requests_per_s / capacity(costs, lengths).requests_per_s,
    )


def simulated_requests(
    costs: ServerCosts,
    lengths: RequestLengths,
    requests_per_s: float,
    *,
    requests: int = _REQUESTS,
    seed: int = 0,
) -> list[SimulatedRequest] | None:
    """The requests of a simulation as they arrive; None as for `simulate`.

    seed: the time between two arrivals is `expovariate(requests_per_s)` of `random.Random(seed)`."""
    if requests_per_s / capacity(costs, lengths).requests_per_s >= _MOST_LOAD:
        return None
    draw = random.Random(seed)
    server = _Simulation(costs, lengths)
    came_s = draw.expovariate(requests_per_s)
    ready_s = came_s + costs.overhead_s
    ended = 0
    found: list[SimulatedRequest] = []
    while ended < requests:
        while len(found) < requests and ready_s <= server.now_s:
            found.append(server.arrive(came_s))
            came_s += draw.expovariate(requests_per_s)
            ready_s = max(came_s, ready_s) + costs.overhead_s
        ended += server.advance(ready_s if len(found) < requests else float("inf"))
    return found


def _p95(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) * 95 // 100, len(seconds) - 1)] * 1e3


def highest_rate(
    costs: ServerCosts, lengths: RequestLengths, target: LatencyTarget, most_load: float
) -> float:
    """The most requests a second of one server that keep to the target; 0: not even a single one does."""
    high = capacity(costs, lengths).requests_per_s * min(most_load, _MOST_LOAD)
    if _holds(costs, lengths, high * 0.999, target):
        return high
    low = 0.0
    while high - low > high * _PRECISION:
        middle = (low + high) / 2
        if _holds(costs, lengths, middle, target):
            low = middle
        else:
            high = middle
        if high < capacity(costs, lengths).requests_per_s * 1e-3:
            return 0.0
    return low


def _holds(
    costs: ServerCosts, lengths: RequestLengths, requests_per_s: float, target: LatencyTarget
) -> bool:
    found = simulate(costs, lengths, requests_per_s)
    return found is not None and found.meets(target)
