"""Capacity of a served model: what a request costs, how many fit in time, and how long they wait.

A request costs the prefill of its prompt, which requests take one after the other, and its share of decode
steps, which all running requests take together. Both costs come from the points of a benchmark; waiting comes
from a simulation of requests that arrive at random.
"""

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from localchat.bench.statistics import LatencyTarget, Percentiles, percentiles
from localchat.bench.sweep import Point

_REQUESTS: Final = 4000
"""Of a simulation; the first fifth finds the server empty and does not count."""
_LEAST_PREFILL_S: Final = 1e-6
_LEAST_CHUNK: Final = 0.2
"""Share of a step that a waiting prompt gets at least."""
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

    A stream pauses for a step; what its tokens take beyond that, the prompts of the other clients took, one
    for each of its answers. The rest of the TTFT of the smallest number of clients delays nobody else."""
    within = [one for one in line if one.place.clients <= slots] or [line[0]]
    first, last = within[0], within[-1]
    steps: list[tuple[int, float]] = []
    for point in within:
        # A step of more requests is never shorter, whatever the noise says.
        steps.append((point.place.clients, max(_step_s(point), steps[-1][1] if steps else 0.0)))
    wait_s = max(first.figures.ttft_ms.p50 / 1e3 - steps[0][1], _LEAST_PREFILL_S)
    prefill_s = wait_s / max(_computed(first), 1.0) / first.place.clients
    if last.place.clients > 1 and last.figures.step_ms is not None and last.figures.tpot_ms:
        delay_s = last.figures.tpot_ms.mean / 1e3 - steps[-1][1]
        prompts = (last.place.clients - 1) * _computed(last) / last.figures.completion_tokens
        prefill_s = min(prefill_s, delay_s / max(prompts, _LEAST_PREFILL_S))
    prefill_s = max(prefill_s, _LEAST_PREFILL_S)
    return ServerCosts(
        prefill_s=prefill_s,
        steps_s=tuple(steps),
        slots=slots,
        budget_s=budget_s,
        overhead_s=max(wait_s - first.place.clients * prefill_s * _computed(first), 0.0),
    )


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
class _Running:
    arrived_s: float
    left_tokens: float = 0.0
    first_s: float = 0.0


@dataclass(slots=True)
class _Simulation:
    """A server between two events: prompts are read one after the other, running requests decode together."""

    costs: ServerCosts
    lengths: RequestLengths
    now_s: float = 0.0
    decoded: float = 0.0
    """Tokens that a request would have, if it had run from the beginning."""
    waiting: deque[_Running] = field(default_factory=deque)
    prompts: deque[_Running] = field(default_factory=deque)
    running: list[tuple[float, int, _Running]] = field(default_factory=list)
    """By the value of `decoded` at which they end."""
    count: int = 0
    held: int = 0
    held_s: float = 0.0

    def rates(self) -> tuple[float, float]:
        """Decoded tokens a second of each running request, and prompt tokens a second of the first prompt."""
        running = len(self.running)
        if not self.prompts:
            return (1 / self.costs.step_s(running) if running else 0.0), 0.0
        if not running:
            return 0.0, 1 / self.costs.prefill_s
        step_s = self.costs.step_s(running)
        prompt_s = self.lengths.prompt * self.costs.prefill_s
        whole_s = max(min(self.costs.budget_s, step_s + prompt_s), step_s / (1 - _LEAST_CHUNK))
        return 1 / whole_s, (whole_s - step_s) / self.costs.prefill_s / whole_s

    def advance(self, arrival_s: float) -> _Running | None:
        """Go on to the next event, at most to `arrival_s`. Returns a request that ended."""
        decode, prefill = self.rates()
        ends_s = (
            self.now_s + (self.running[0][0] - self.decoded) / decode if decode else float("inf")
        )
        read_s = self.now_s + self.prompts[0].left_tokens / prefill if prefill else float("inf")
        to_s = min(arrival_s, ends_s, read_s)
        elapsed_s = max(to_s - self.now_s, 0.0)
        self.held_s += elapsed_s * self.held
        self.decoded += elapsed_s * decode
        if self.prompts:
            self.prompts[0].left_tokens -= elapsed_s * prefill
        self.now_s = to_s
        if to_s == ends_s:
            return self._end()
        if to_s == read_s:
            self._begin_answer()
        return None

    def arrive(self, arrived_s: float) -> None:
        """A request is ready to be read now. arrived_s: when it came."""
        self.held += 1
        self.waiting.append(_Running(arrived_s, self.lengths.prompt))
        self._admit()

    def _admit(self) -> None:
        while self.waiting and len(self.running) + len(self.prompts) < self.costs.slots:
            self.prompts.append(self.waiting.popleft())

    def _begin_answer(self) -> None:
        one = self.prompts.popleft()
        one.first_s = self.now_s
        self.count += 1
        heapq.heappush(
            self.running, (self.decoded + max(self.lengths.output - 1, 0.0), self.count, one)
        )

    def _end(self) -> _Running:
        _, _, one = heapq.heappop(self.running)
        self.held -= 1
        self._admit()
        return one


def simulate(
    costs: ServerCosts, lengths: RequestLengths, requests_per_s: float, *, requests: int = _REQUESTS
) -> QueueFigures | None:
    """Times of requests that arrive at random at one server; None where they come faster than it answers."""
    load = requests_per_s / capacity(costs, lengths).requests_per_s
    if load >= _MOST_LOAD:
        return None
    draw = random.Random(0)
    server = _Simulation(costs, lengths)
    came_s = draw.expovariate(requests_per_s)
    ready_s, arrived, ended = came_s + costs.overhead_s, 0, 0
    ttft: list[float] = []
    tpot: list[float] = []
    while ended < requests:
        done = server.advance(ready_s if arrived < requests else float("inf"))
        if done is not None:
            ended += 1
            if ended > requests // 5:
                ttft.append(done.first_s - done.arrived_s)
                tpot.append((server.now_s - done.first_s) / max(lengths.output - 1, 1.0))
        elif server.now_s == ready_s and arrived < requests:
            server.arrive(came_s)
            arrived += 1
            came_s += draw.expovariate(requests_per_s)
            ready_s = max(came_s, ready_s) + costs.overhead_s
    return QueueFigures(
        percentiles(ttft),
        _p95(ttft),
        percentiles(tpot),
        _p95(tpot),
        server.held_s / server.now_s,
        load,
    )


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
