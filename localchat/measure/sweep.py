"""Sweep of a benchmark: variants in interleaved rounds, shapes, contexts, and rising numbers of clients.

Events tell whoever watches what happens; what was measured stays in `Sweep.points` even if it is interrupted.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec

from localchat.errors import LocalchatError
from localchat.measure.client import is_refusal
from localchat.measure.endpoint import BenchEndpoint, prepared
from localchat.measure.energy import EnergyMeter
from localchat.measure.load import LoadProgress, LoadSpec, ask_each, run_load
from localchat.measure.memory_roof import MemoryRoof
from localchat.measure.server_metrics import WatchedCounters, watched_counters
from localchat.measure.statistics import LatencyTarget, PointFigures, figures
from localchat.measure.workload import Shape, earlier_turn, messages

_RISE: Final = 1.05
"""A number of clients counts as faster if it brings a twentieth more than all smaller ones."""
_LEVELS_WITHOUT_RISE: Final = 2
"""In succession, after which a sweep ends: a single one may be slow by chance."""
_SATURATED: Final = 0.95
"""Of the best throughput, from which the server counts as saturated."""


class BenchVariant(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model with settings, measured beside others."""

    name: str
    """Of the variant, within the benchmark."""
    model: str
    """The word for it, or the address of a server."""
    settings: dict[str, str] = {}
    """Values by key, over those of the settings file."""
    parallel: int | None = None
    """Requests that its server computes at once."""


class ServedVariant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A variant as its server describes itself."""

    variant: BenchVariant
    model: str
    """As the server calls it."""
    url: str = ""
    """Empty: a server of our own, on this machine."""
    properties: dict[str, Any] = {}
    roof: MemoryRoof | None = None


class PointPlace(msgspec.Struct, frozen=True):
    """Where in a sweep a point stands."""

    variant: str
    shape: str
    context_tokens: int
    clients: int


class Point(msgspec.Struct, frozen=True):
    """One measurement."""

    place: PointPlace
    round: int
    """From 0."""
    figures: PointFigures


class ServerStarted(msgspec.Struct, frozen=True):
    """The server of a variant loads its model."""

    variant: str
    round: int


class PointStarted(msgspec.Struct, frozen=True):
    """A point begins."""

    place: PointPlace
    round: int
    at: int
    """Points before it."""
    total: int
    """As far as it is known: fewer, if the throughput stops rising."""


class PointAdvanced(msgspec.Struct, frozen=True):
    """Requests of the running point were answered."""

    place: PointPlace
    requests: int
    tokens_per_s: float
    failed: int


class PointMeasured(msgspec.Struct, frozen=True):
    """A point is complete."""

    point: Point


class PointRefused(msgspec.Struct, frozen=True):
    """The server does not take these requests, for instance because they are longer than its context."""

    place: PointPlace
    reason: str


SweepEvent: TypeAlias = ServerStarted | PointStarted | PointAdvanced | PointMeasured | PointRefused
OpenServer = Callable[
    [BenchVariant], "AbstractContextManager[tuple[BenchEndpoint, MemoryRoof | None]]"
]
"""Serves a variant until the end of the block, or gives the address of a running server."""


class SweepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Extent of a sweep."""

    variants: tuple[BenchVariant, ...]
    shapes: tuple[Shape, ...]
    contexts: tuple[int, ...] = (0,)
    """Tokens of an earlier turn before each request, which the server may have in its prefix cache."""
    clients: tuple[int, ...] = ()
    """Numbers of clients; empty: 1, 2, 4, ... until the throughput stops rising."""
    max_clients: int = 64
    rounds: int = 1
    requests: int | None = None
    """Of each client; None: as many as begin within `seconds`."""
    seconds: float = 10.0
    target: LatencyTarget = LatencyTarget()
    temperature: float = 0.0

    def levels(self) -> list[int]:
        """Numbers of clients, rising."""
        if self.clients:
            return sorted(set(self.clients))
        found = [1]
        while found[-1] * 2 <= self.max_clients:
            found.append(found[-1] * 2)
        return found


@dataclass(slots=True)
class Sweep:
    """Runs a sweep and keeps what it has measured."""

    spec: SweepSpec
    open_server: OpenServer
    show: Callable[[SweepEvent], None]
    points: list[Point] = field(default_factory=list)
    served: dict[str, ServedVariant] = field(default_factory=dict)
    """By the names of the variants."""
    meter: EnergyMeter = field(default_factory=EnergyMeter)
    _run: str = field(default_factory=lambda: secrets.token_hex(4))
    """Makes the texts of two benchmarks differ, so that neither finds the other's in a prefix cache."""
    _levels: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)
    """Levels of a place that was measured in an earlier round."""
    _done: int = 0

    def run(self) -> None:
        """Measure everything. Raises LocalchatError; Ctrl+C leaves what was measured."""
        variants = self.spec.variants
        for number in range(self.spec.rounds):
            for variant in variants if number % 2 == 0 else reversed(variants):
                self.show(ServerStarted(variant.name, number))
                with self.open_server(variant) as (endpoint, roof):
                    self._run_variant(
                        variant, prepared(endpoint, self._run, self.spec.temperature), roof, number
                    )

    def _run_variant(
        self, variant: BenchVariant, endpoint: BenchEndpoint, roof: MemoryRoof | None, number: int
    ) -> None:
        self.served[variant.name] = ServedVariant(
            variant=variant,
            model=endpoint.model,
            url="" if endpoint.own else endpoint.url,
            properties=_plain(endpoint.properties),
            roof=roof,
        )
        for shape in self.spec.shapes:
            for context in self.spec.contexts:
                self._run_levels(_Scene(variant.name, shape, context, number, endpoint, roof))

    def _run_levels(self, scene: "_Scene") -> None:
        key = (scene.variant, scene.shape.name, scene.context)
        known = self._levels.get(key)
        planned = self.spec.levels() if known is None else known
        measured: list[int] = []
        best = 0.0
        without_rise = 0
        for clients in planned:
            place = PointPlace(scene.variant, scene.shape.name, scene.context, clients)
            self.show(PointStarted(place, scene.round, self._done, self._total()))
            try:
                point = self._measure(scene, place)
            except LocalchatError as problem:
                if not is_refusal(problem):
                    raise
                self.show(PointRefused(place, problem.message))
                break
            finally:
                self._done += 1
            self.points.append(point)
            measured.append(clients)
            self.show(PointMeasured(point))
            rate = point.figures.tokens_per_s
            without_rise = without_rise + 1 if rate < best * _RISE else 0
            best = max(best, rate)
            if known is None and not self.spec.clients and without_rise == _LEVELS_WITHOUT_RISE:
                break
        self._levels[key] = measured if known is None else known

    def _measure(self, scene: "_Scene", place: PointPlace) -> Point:
        endpoint = scene.endpoint
        shape = scene.shape
        spec = self.spec
        seed = f"{self._run} {place.variant} {shape.name} {scene.context} {place.clients} {scene.round}"
        earlier = [
            earlier_turn(scene.context, endpoint.scale, f"{seed} {client}")
            for client in range(place.clients)
        ]

        def body(client: int, number: int) -> dict[str, Any]:
            own = messages(shape, endpoint.scale, f"{seed} {client} {number}", self._run)
            return endpoint.body([*earlier[client], *own], shape.output_tokens)

        def advanced(progress: LoadProgress) -> None:
            made = sum(one.completion_tokens for one in progress.samples)
            rate = made / (time.perf_counter() - progress.began_s)
            answered = len(progress.samples)
            self.show(PointAdvanced(place, answered, rate, progress.failed))

        # The first request of a length is slow in many servers. With a context, each client has its own.
        warm = [body(client, -1) for client in range(place.clients if scene.context else 1)]
        ask_each(endpoint.client, [_short(one) for one in warm])
        load = LoadSpec(place.clients, spec.requests, spec.seconds)
        with watched_counters(endpoint.url, endpoint.key) as counters:
            self.meter.restart()
            result = run_load(endpoint.client, load, body, advanced)
            joules = self.meter.joules() if _is_here(endpoint.url) else None
        found = _with_counters(figures(result, spec.target), counters)
        found = msgspec.structs.replace(found, joules=joules)
        if scene.roof is not None:
            share = scene.roof.share(found, place.clients, scene.context)
            found = msgspec.structs.replace(found, roof_share=share)
        return Point(place, scene.round, found)

    def _total(self) -> int:
        """Points of the whole sweep, as far as it is known."""
        spec, fresh = self.spec, len(self.spec.levels())
        keys = [
            (variant.name, shape.name, context)
            for variant in spec.variants
            for shape in spec.shapes
            for context in spec.contexts
        ]
        return sum(len(self._levels.get(key, range(fresh))) for key in keys) * spec.rounds


@dataclass(frozen=True, slots=True)
class _Scene:
    """What the points of one series have in common."""

    variant: str
    shape: Shape
    context: int
    round: int
    endpoint: BenchEndpoint
    roof: MemoryRoof | None


def _short(body: dict[str, Any]) -> dict[str, Any]:
    """The request with an answer of two tokens, to fill caches."""
    name = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
    return {**body, name: 2}


def _with_counters(found: PointFigures, counters: WatchedCounters) -> PointFigures:
    """The figures with what the server's counters tell beyond the answers."""
    peak = counters.peak
    changes: dict[str, Any] = {"preemptions": counters.grown("preemptions")}
    if found.drafted is None:
        changes |= {name: counters.grown(name) for name in ("drafted", "accepted")}
        if drafted := changes["drafted"]:
            changes["acceptance"] = (changes["accepted"] or 0) / drafted
    if total := peak.get("kv_total_tokens"):
        used = max(peak.get("kv_used_tokens", 0.0), found.kv_used_tokens or 0)
        changes |= {
            "kv_used_tokens": round(used),
            "kv_total_tokens": round(total),
            "kv_used_share": used / total,
        }
    elif found.kv_used_share is None:
        changes["kv_used_share"] = peak.get("kv_used_share")
    return msgspec.structs.replace(found, **changes)


def _plain(properties: Mapping[str, object]) -> dict[str, Any]:
    """Properties that describe a build and a load; long ones, such as templates, are left out."""
    names = ("build_info", "model_alias", "architecture", "quantization", "kv_type", "total_slots")
    found: dict[str, Any] = {name: properties[name] for name in names if name in properties}
    settings = properties.get("default_generation_settings")
    if isinstance(settings, dict) and "n_ctx" in settings:
        found["context_tokens"] = settings["n_ctx"]
    return found


def _is_here(url: str) -> bool:
    from localchat.config.remotes import Remote

    return Remote("", url).here


# ---------------------------------------------------------------------------- series


def series(points: Iterable[Point]) -> Iterator[list[Point]]:
    """The points of each variant, shape and context by rising clients: of several rounds the one with the
    median throughput."""
    groups: dict[tuple[str, str, int], dict[int, list[Point]]] = {}
    for point in points:
        place = point.place
        group = groups.setdefault((place.variant, place.shape, place.context_tokens), {})
        group.setdefault(place.clients, []).append(point)
    for group in groups.values():
        yield [_median(group[clients]) for clients in sorted(group)]


def rates(points: Iterable[Point], place: PointPlace) -> list[float]:
    """Throughput of every round at one place, in the order of the rounds."""
    found = sorted((one for one in points if one.place == place), key=lambda one: one.round)
    return [one.figures.tokens_per_s for one in found]


class Saturation(msgspec.Struct, frozen=True):
    """The load from which more clients only wait."""

    clients: int
    tokens_per_s: float
    """The best of the series."""
    reached: bool
    """False: the throughput still rose at the largest number of clients."""


def saturation(line: list[Point]) -> Saturation | None:
    """The saturation of a series; None for a single number of clients."""
    if len(line) < 2:
        return None
    rates_ = [one.figures.tokens_per_s for one in line]
    best = max(rates_)
    first = next(one for one in line if one.figures.tokens_per_s >= best * _SATURATED)
    return Saturation(first.place.clients, best, reached=rates_[-1] < max(rates_[:-1]) * _RISE)


def _median(points: list[Point]) -> Point:
    ranked = sorted(points, key=lambda one: one.figures.tokens_per_s)
    return ranked[len(ranked) // 2]
