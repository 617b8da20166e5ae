"""Sweep of a benchmark: variants in interleaved rounds, shapes, and rising numbers of clients.

Observers receive events. `Sweep.points` holds all results so far, also after an interruption.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from localchat.errors import LocalchatError
from localchat.measure.client import is_refusal
from localchat.measure.endpoint import BenchEndpoint, prepared
from localchat.measure.load import (
    LoadProgress,
    LoadSpec,
    ask_each,
    run_disruption,
    run_load,
)
from localchat.measure.statistics import (
    LatencyTarget,
    PointFigures,
    disruption_figures,
    figures,
)
from localchat.measure.variants import BenchVariant
from localchat.measure.workload import (
    BURST,
    DISRUPTION_CLIENTS,
    Shape,
    messages,
)
from localchat.units import counted

_RISE: Final = 1.05
"""Factor over all lower levels from which a level counts as faster."""
_LEVELS_WITHOUT_RISE: Final = 2
"""Levels in a row that end a sweep. A single one may be slow by chance."""
_SATURATED: Final = 0.95
"""Share of the best throughput from which a server counts as saturated."""
_PROPERTIES: Final = (
    *("build_info", "model_alias", "architecture", "quantization", "kv_type", "total_slots"),
)
"""Properties of a server that describe its build and its load."""


class ServedVariant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A variant as its server describes itself."""

    variant: BenchVariant
    model: str
    """Name that the server uses."""
    url: str = ""
    """Address of a running server; empty for a server of the benchmark."""
    properties: dict[str, Any] = {}


class PointKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """Conditions of a point, which identify it within a sweep."""

    variant: str
    shape: str
    clients: int
    """0 for an open loop."""
    rate: float = 0.0
    """Requests per second of an open loop; 0 for clients."""

    @property
    def load(self) -> str:
        """`4 clients`, or `2.5 requests/s`."""
        if self.rate:
            return f"{self.rate:g} requests/s"
        return counted(self.clients, "client")


class Point(msgspec.Struct, frozen=True):
    """Result of one round at one number of clients."""

    key: PointKey = msgspec.field(name="place")
    round: int
    """Number of the round, from 0."""
    figures: PointFigures


class ServerStarted(NamedTuple):
    """The server of a variant starts to load its model."""

    variant: str


class PointStarted(NamedTuple):
    """A point starts."""

    key: PointKey
    done: int
    """Points before it."""
    total: int
    """Points of the sweep, unless the throughput stops rising earlier."""


class PointAdvanced(NamedTuple):
    """Requests of the running point were answered."""

    key: PointKey
    requests: int
    tokens_per_s: float
    failed: int


class PointMeasured(NamedTuple):
    """A point is complete."""

    point: Point


class PointRefused(NamedTuple):
    """The server rejects these requests, for instance because they exceed its context."""

    key: PointKey
    reason: str


SweepEvent: TypeAlias = ServerStarted | PointStarted | PointAdvanced | PointMeasured | PointRefused
OpenServer = Callable[[BenchVariant], AbstractContextManager[BenchEndpoint]]
"""Serves a variant during the block, or returns the address of a running server."""


class SweepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Extent of a sweep."""

    variants: tuple[BenchVariant, ...]
    shapes: tuple[Shape, ...]
    clients: tuple[int, ...] = ()
    """Numbers of clients; empty for 1, 2, 4, ... until the throughput stops rising."""
    max_clients: int = 64
    rounds: int = 1
    requests: int | None = None
    """Requests of each client; None for as many as start within `seconds`."""
    seconds: float = 10.0
    target: LatencyTarget = LatencyTarget()
    temperature: float = 0.0
    rates: tuple[float, ...] = ()
    """Requests per second of an open loop; empty for clients."""
    machine_hour: float | None = None
    """Price of the machine for an hour. None: unknown."""

    def levels(self, shape: Shape) -> list[int]:
        """Return the numbers of clients, rising."""
        if self.clients:
            return sorted(set(self.clients))
        if shape.kind == "disruption":
            return [DISRUPTION_CLIENTS]
        levels = [1]
        while levels[-1] * 2 <= self.max_clients:
            levels.append(levels[-1] * 2)
        return levels


def without_prompts(spec: SweepSpec) -> SweepSpec:
    """Return the spec as `--json` prints it, without the user's own texts."""
    shapes = tuple(replace(shape, prompts=()) for shape in spec.shapes)
    return msgspec.structs.replace(spec, shapes=shapes)


class _SeriesKey(NamedTuple):
    """Conditions that the points of one series share."""

    variant: str
    shape: str


class _Series(NamedTuple):
    """Series of points of a round, with its server."""

    key: _SeriesKey
    shape: Shape
    round: int
    endpoint: BenchEndpoint


@dataclass(slots=True)
class Sweep:
    """Runs a sweep and collects its points."""

    spec: SweepSpec
    open_server: OpenServer
    show: Callable[[SweepEvent], None]
    run_id: str = field(default_factory=lambda: secrets.token_hex(4))
    """Seed of all texts. Two benchmarks must not hit each other's entries of a prefix cache."""
    points: list[Point] = field(default_factory=list)
    served: dict[str, ServedVariant] = field(default_factory=dict)
    """Servers by the names of their variants."""
    _levels: dict[_SeriesKey, list[int]] = field(default_factory=dict)
    """Numbers of clients that an earlier round of a series measured."""
    _done: int = 0

    def run(self) -> None:
        """Measure everything. Raises LocalchatError; Ctrl+C leaves the points measured so far."""
        variants = self.spec.variants
        for round_ in range(self.spec.rounds):
            for variant in variants if round_ % 2 == 0 else reversed(variants):
                self.show(ServerStarted(variant.name))
                with self.open_server(variant) as opened:
                    endpoint = prepared(opened, self.run_id, self.spec.temperature)
                    self._run_variant(variant, endpoint, round_)

    def _run_variant(self, variant: BenchVariant, endpoint: BenchEndpoint, round_: int) -> None:
        self.served[variant.name] = ServedVariant(
            variant=variant,
            model=endpoint.model,
            url="" if endpoint.own else endpoint.url,
            properties=_short_properties(endpoint.properties),
        )
        for shape in self.spec.shapes:
            key = _SeriesKey(variant.name, shape.name)
            self._run_series(_Series(key, shape, round_, endpoint))

    def _run_series(self, series: _Series) -> None:
        # Later rounds repeat the levels of the first one, so that all rounds are comparable.
        earlier = self._levels.get(series.key)
        measured: list[int] = []
        best = 0.0
        levels_without_rise = 0
        if self.spec.rates:
            keys = [PointKey(*series.key, 0, rate) for rate in sorted(set(self.spec.rates))]
        else:
            levels = self.spec.levels(series.shape) if earlier is None else earlier
            keys = [PointKey(*series.key, clients) for clients in levels]
        for key in keys:
            self.show(PointStarted(key, self._done, self._total()))
            try:
                point = self._measure(series, key)
            except LocalchatError as problem:
                if not is_refusal(problem):
                    raise
                self.show(PointRefused(key, problem.message))
                break
            finally:
                self._done += 1
            self.points.append(point)
            measured.append(key.clients)
            self.show(PointMeasured(point))
            rate = point.figures.tokens_per_s
            levels_without_rise += 1
            if rate >= best * _RISE:
                levels_without_rise = 0
            best = max(best, rate)
            is_open_ended = earlier is None and not (self.spec.clients or self.spec.rates)
            if is_open_ended and levels_without_rise == _LEVELS_WITHOUT_RISE:
                break
        if earlier is None:
            self._levels[series.key] = measured

    def _measure(self, series: _Series, key: PointKey) -> Point:
        endpoint = series.endpoint
        shape = series.shape
        level = key.rate or key.clients
        seed = f"{self.run_id} {key.variant} {shape.name} {level} {series.round}"

        def body(client: int, number: int) -> dict[str, Any]:
            own = messages(shape, endpoint.scale, f"{seed} {client} {number}", self.run_id)
            return endpoint.body(own, shape.output_tokens)

        def on_answer(progress: LoadProgress) -> None:
            tokens = sum(sample.completion_tokens for sample in progress.samples)
            rate = tokens / (time.perf_counter() - progress.began_s)
            self.show(PointAdvanced(key, len(progress.samples), rate, progress.failed))

        # Many servers are slow at the first request of a length.
        ask_each(endpoint.client, [_shortened(body(0, -1))])
        load = LoadSpec(key.clients, self.spec.requests, self.spec.seconds, key.rate, seed)
        disrupted = None
        if shape.kind == "disruption":
            burst = [
                messages(BURST, endpoint.scale, f"{seed} burst {number}", self.run_id)
                for number in range(key.clients)
            ]
            disruption = run_disruption(
                endpoint.client,
                [body(client, 0) for client in range(key.clients)],
                [endpoint.body(prompt, BURST.output_tokens) for prompt in burst],
            )
            result = disruption.streams
            disrupted = disruption_figures(result.samples, disruption.burst, disruption.burst_s)
        else:
            result = run_load(endpoint.client, load, body, on_answer)
        point = figures(result, self.spec.target)
        point = msgspec.structs.replace(point, disruption=disrupted)
        return Point(key, series.round, point)

    def _total(self) -> int:
        """Return the points of the whole sweep, as far as they are predictable."""
        spec = self.spec
        level_counts = [
            len(
                spec.rates
                or self._levels.get(_SeriesKey(variant.name, shape.name), spec.levels(shape))
            )
            for variant in spec.variants
            for shape in spec.shapes
        ]
        return sum(level_counts) * spec.rounds


def _shortened(body: dict[str, Any]) -> dict[str, Any]:
    """Limit the answer of a request to two tokens, to fill caches."""
    limit = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
    return {**body, limit: 2}


def _short_properties(properties: Mapping[str, object]) -> dict[str, Any]:
    """Select the properties worth printing. Templates and others are too long."""
    selected: dict[str, Any] = {
        name: properties[name] for name in _PROPERTIES if name in properties
    }
    settings = properties.get("default_generation_settings")
    if isinstance(settings, dict) and "n_ctx" in settings:
        selected["context_tokens"] = settings["n_ctx"]
    return selected


def point_series(points: Iterable[Point]) -> Iterator[list[Point]]:
    """Yield the points of each variant and shape by rising load.

    Several rounds are represented by the one with the median throughput.
    """
    groups: dict[_SeriesKey, dict[tuple[float, int], list[Point]]] = {}
    for point in points:
        key = point.key
        group = groups.setdefault(_SeriesKey(key.variant, key.shape), {})
        group.setdefault((key.rate, key.clients), []).append(point)
    for group in groups.values():
        yield [_median(group[level]) for level in sorted(group)]


def _median(points: list[Point]) -> Point:
    ranked = sorted(points, key=lambda point: point.figures.tokens_per_s)
    return ranked[len(ranked) // 2]


def rates(points: Iterable[Point], key: PointKey) -> list[float]:
    """Return the throughput under these conditions, round by round."""
    rounds = sorted((point for point in points if point.key == key), key=lambda point: point.round)
    return [point.figures.tokens_per_s for point in rounds]


class Saturation(NamedTuple):
    """Load beyond which more clients only wait."""

    clients: int
    tokens_per_s: float
    """Best throughput of the series."""
    reached: bool
    """False if the throughput still rose at the largest number of clients."""


def saturation(series: list[Point]) -> Saturation | None:
    """Find the saturation of a series. None for a single number of clients or an open loop."""
    if len(series) < 2 or series[0].key.rate:
        return None
    throughputs = [point.figures.tokens_per_s for point in series]
    best = max(throughputs)
    first = next(point for point in series if point.figures.tokens_per_s >= best * _SATURATED)
    reached = throughputs[-1] < max(throughputs[:-1]) * _RISE
    return Saturation(first.key.clients, best, reached)
