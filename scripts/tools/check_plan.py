"""Compares what `localchat plan` predicts from a benchmark with a load of requests that arrive at random.

    python -m scripts.tools.check_plan MODEL [--parallel 8] [--shape 100+40] [--loads 0.3 0.6 0.8] [--paced]
    python -m scripts.tools.check_plan URL ...

One server is swept as `bench` does, then driven beyond its saturation, then by random arrivals at shares of
the measured saturation. Each round does all of it, and predicts from its own sweep: the saturation, and the
times to first token at the rate of each load. Told is the median of rounds.

Requests of a simulation arrive when those of its load do, as the p95 of a few hundred differs between two draws
of their times by more than is asked for here; "in the long run" is what `plan` says, of thousands.
--limit is shared among the loads, however slow the machine is; a load whose requests are not all answered in
its time was more than the server takes. A queue says nothing where the machine itself became faster or slower
in between: the saturation is measured after each load again, and a load between two that differ by more than a
tenth is told and does not count. On cores whose speed never holds, `--paced` lets each step take its time.

The last line is JSON. Ends with 1 if the saturation is more than 10 % off, a p95 of TTFT more than 20 %, a
load was too much, or none of its rounds counts.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from localchat.backend_api.registry import usable_machine
from localchat.measure.capacity import RequestLengths, capacity, simulate, simulated_requests
from localchat.measure.client import RequestSample
from localchat.measure.endpoint import BenchEndpoint, prepared
from localchat.measure.load import LoadSpec, run_load
from localchat.measure.memory_roof import MemoryRoof
from localchat.measure.records import BenchRecord, MachineRecord, now
from localchat.measure.server_process import ServerCommand, server_process
from localchat.measure.service_plan import measured_source
from localchat.measure.statistics import LatencyTarget, figures
from localchat.measure.sweep import Sweep, SweepSpec
from localchat.measure.variants import BenchVariant, is_running
from localchat.measure.workload import Shape, messages, parse_shape

_BEYOND: Final = 3
"""Clients for each slot that saturate the server."""
_LEAST_REQUESTS: Final = 20
_DRAIN_S: Final = 10.0
"""At the end of a load, when no request comes and the last ones are answered."""
_WANTED_SATURATION, _WANTED_P95 = 0.1, 0.2


_STEADY: Final = 0.1
_PACED: Final = "scripts.tools.paced_backend:PacedBackend"


class TooMuch(Exception):
    """Requests of a load were left when its time was over."""


class Unsteady(Exception):
    """The machine had another speed after a load."""


class Load:
    """Sends requests of one shape to a server."""

    def __init__(self, endpoint: BenchEndpoint, shape: Shape, number: int) -> None:
        """`number`: of the round. What one has asked, the prefix cache would give the next one."""
        self._endpoint = endpoint
        self._shape = shape
        self._number = number
        self._asked = 0

    def body(self, _client: int = 0, _number: int = 0) -> dict[str, Any]:
        """A request that shares its beginning with no other."""
        self._asked += 1
        seed = f"{os.getpid()} {self._number} {self._asked}"
        asked = messages(self._shape, self._endpoint.scale, seed, "plan")
        return self._endpoint.body(asked, self._shape.output_tokens)

    def saturated(self, clients: int, seconds: float) -> float:
        """Requests a second while so many clients ask without a pause."""
        spec = LoadSpec(clients, seconds=seconds)
        result = run_load(self._endpoint.client, spec, self.body, lambda _: None)
        return figures(result, LatencyTarget()).requests_per_s

    def at_random(self, rate: float, seconds: float, seed: int) -> list[RequestSample]:
        """Requests that arrive at random, as those of a simulation with `seed`, in their order.

        Raises TooMuch."""

        async def run() -> list[RequestSample]:
            draw = random.Random(seed)
            tasks: list[asyncio.Task[RequestSample]] = []
            at_s = time.perf_counter()
            last_s = at_s + seconds - _DRAIN_S
            while (at_s := at_s + draw.expovariate(rate)) < last_s or len(tasks) < _LEAST_REQUESTS:
                await asyncio.sleep(at_s - time.perf_counter())
                tasks.append(asyncio.create_task(self._endpoint.client.ask(self.body())))
            _, left = await asyncio.wait(tasks, timeout=_DRAIN_S)
            for one in left:
                one.cancel()
            if left:
                raise TooMuch(f"{len(left)} of {len(tasks)} requests were not answered in time")
            return [one.result() for one in tasks]

        return asyncio.run(run())


@dataclass(frozen=True, slots=True)
class Pair:
    """A measured figure and its prediction."""

    measured: float
    predicted: float
    requests: int = 0
    long_run: float | None = None
    """The prediction for thousands of requests."""

    @property
    def ratio(self) -> float:
        """The prediction over what was measured."""
        return self.predicted / self.measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL|URL")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--shape", default="100+40")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=480.0, help="seconds of all rounds")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each point of the sweep")
    parser.add_argument(
        "--paced", action="store_true", help="by paced_backend.py, for unsteady cores"
    )
    asked = parser.parse_args()
    found = _check(asked)
    print(json.dumps(found))
    return 0 if found["ok"] else 1


def _check(asked: argparse.Namespace) -> dict[str, Any]:
    settings = {"backend": _PACED} if asked.paced else {}
    variant = BenchVariant(asked.model, asked.model, settings, asked.parallel)
    saturations: list[Pair] = []
    waits_ms: dict[float, list[Pair]] = {share: [] for share in asked.loads}
    problems: list[str] = []
    with _open(variant) as (endpoint, _):
        began_s = time.perf_counter()
        for number in range(asked.rounds):
            end_s = began_s + asked.limit * (number + 1) / asked.rounds
            one = _Round(endpoint, variant, asked, number)
            saturations.append(one.saturation)
            _show("saturation, requests a second", one.saturation)
            for at, share in enumerate(asked.loads):
                left_s = (end_s - time.perf_counter()) / (len(asked.loads) - at)
                try:
                    waits_ms[share].append(one.p95_ms(share, left_s, number))
                except TooMuch as problem:
                    problems.append(f"load {share:.0%}: {problem}")
                    print(problems[-1], flush=True)
                except Unsteady as problem:
                    print(f"load {share:.0%} does not count: {problem}", flush=True)
                else:
                    _show(f"load {share:.0%}, p95 of TTFT in ms", waits_ms[share][-1])
    off = _median_off(saturations)
    late = {share: _median_off(pairs) for share, pairs in waits_ms.items() if pairs}
    print(f"median of the rounds: saturation {off:+.1%}, p95 of TTFT", end=" ")
    print(", ".join(f"{share:+.1%} at {load:.0%}" for load, share in late.items()))
    ok = not problems and abs(off) <= _WANTED_SATURATION and all(waits_ms.values())
    ok = ok and all(abs(share) <= _WANTED_P95 for share in late.values())
    rounds = {
        f"{share}": [[one.measured, one.predicted] for one in pairs]
        for share, pairs in [("saturation", saturations), *waits_ms.items()]
    }
    return {"saturation": off, "p95": late, "rounds": rounds, "problems": problems, "ok": ok}


class _Round:
    """A sweep with what it predicts, beside loads of the same server."""

    def __init__(
        self, endpoint: BenchEndpoint, variant: BenchVariant, asked: argparse.Namespace, number: int
    ) -> None:
        shape = parse_shape(asked.shape)
        levels = [1 << power for power in range(10) if 1 << power <= asked.parallel]
        spec = SweepSpec(
            variants=(variant,), shapes=(shape,), clients=tuple(levels), seconds=asked.seconds
        )
        sweep = Sweep(spec, _standing(endpoint), lambda _: None)
        sweep.run()
        machine = MachineRecord.of(usable_machine())
        served, points = tuple(sweep.served.values()), tuple(sweep.points)
        record = BenchRecord(at=now(), machine=machine, spec=spec, served=served, points=points)
        self._costs = measured_source(record).costs
        prompt = statistics.fmean(point.figures.prompt_tokens for point in points)
        self._lengths = RequestLengths(prompt, shape.output_tokens)
        self._load = Load(prepared(endpoint, f"plan {number}"), shape, number)
        self._saturating = asked.parallel * _BEYOND, asked.seconds
        most = self._load.saturated(*self._saturating)
        self.saturation = Pair(most, capacity(self._costs, self._lengths).requests_per_s)
        self._now = most
        """The saturation that was measured last."""

    def p95_ms(self, share: float, seconds: float, seed: int) -> Pair:
        """Of the time to the first token at this share of the saturation. Raises TooMuch, Unsteady."""
        rate = share * self.saturation.measured
        before = self._now
        try:
            found = self._load.at_random(rate, seconds - self._saturating[1], seed)
        finally:
            self._now = self._load.saturated(*self._saturating)
            speeds = (self.saturation.measured, before, self._now)
            if max(speeds) > min(speeds) * (1 + _STEADY):
                told = ", ".join(f"{one:.2f}" for one in speeds)
                raise Unsteady(f"the saturation was {told} requests a second in turn")
        expected = simulated_requests(
            self._costs, self._lengths, rate, requests=len(found), seed=seed
        )
        long_run = simulate(self._costs, self._lengths, rate)
        if expected is None or long_run is None:
            raise TooMuch(f"{rate:.2f} requests a second are more than was predicted")
        first = len(found) // 5  # the first ones find the server empty
        p95_ms = [
            statistics.quantiles(times_s, n=100, method="inclusive")[94] * 1e3
            for times_s in (
                [one.ttft_s for one in requests[first:]] for requests in (found, expected)
            )
        ]
        return Pair(p95_ms[0], p95_ms[1], len(found) - first, long_run.ttft_p95_ms)


def _show(what: str, pair: Pair) -> None:
    of = f" of {pair.requests} requests" if pair.requests else ""
    later = f", {pair.long_run:.2f} in the long run" if pair.long_run is not None else ""
    told = f"predicted {pair.predicted:.2f} ({pair.ratio:.2f}){later}"
    print(f"{what}: {pair.measured:.2f}{of}, {told}", flush=True)


def _median_off(pairs: list[Pair]) -> float:
    return statistics.median(one.ratio for one in pairs) - 1


@contextmanager
def _open(variant: BenchVariant) -> "Iterator[tuple[BenchEndpoint, MemoryRoof | None]]":
    if is_running(variant.model):
        yield BenchEndpoint(variant.model), None
        return
    command = ServerCommand(variant.model, variant.settings, variant.parallel)
    with server_process(command, os.environ) as server:
        yield BenchEndpoint(server.url, own=True), None


def _standing(endpoint: BenchEndpoint) -> Any:  # noqa: ANN401 - the type of OpenServer
    """Gives the sweep a server that runs already."""

    @contextmanager
    def give(_: BenchVariant) -> "Iterator[tuple[BenchEndpoint, MemoryRoof | None]]":
        yield endpoint, None

    return give


if __name__ == "__main__":
    sys.exit(main())
