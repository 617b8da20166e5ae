"""Compares what `localchat plan` predicts from a benchmark with a load of requests that arrive at random.

    python -m scripts.tools.check_plan MODEL [--parallel 8] [--shape 100+40] [--loads 0.3 0.6 0.8] [--rounds 2]
    python -m scripts.tools.check_plan URL ...

One server is swept as `bench` does, then driven beyond its saturation, then by random arrivals at shares of the
measured saturation; in rounds, so that sweep and load meet the same machine. Predicted are the saturation, and
the times to first token at the rate of each load, from the median of the sweeps.

The last line is JSON. Ends with 1 if the saturation is more than 10 % off or a p95 of TTFT more than 20 %.
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
from typing import Any, Final

from localchat.backend_api.registry import usable_machine
from localchat.bench.capacity import RequestLengths, capacity, simulate
from localchat.bench.client import RequestSample
from localchat.bench.endpoint import BenchEndpoint, prepared
from localchat.bench.load import LoadSpec, run_load
from localchat.bench.memory_roof import MemoryRoof
from localchat.bench.record import BenchRecord, MachineRecord, now
from localchat.bench.server_process import ServerCommand, server_process
from localchat.bench.service_plan import measured_source
from localchat.bench.statistics import LatencyTarget, figures
from localchat.bench.sweep import BenchVariant, Sweep, SweepSpec
from localchat.bench.variants import is_running
from localchat.bench.workload import Shape, messages, parse_shape

_BEYOND: Final = 3
"""Clients for each slot that saturate the server."""
_WANTED_SATURATION, _WANTED_P95 = 0.1, 0.2


class Load:
    """Sends requests of one shape to a server."""

    def __init__(self, endpoint: BenchEndpoint, shape: Shape) -> None:
        self._endpoint = endpoint
        self._shape = shape
        self._asked = 0

    def body(self, _client: int = 0, _number: int = 0) -> dict[str, Any]:
        """A request that shares its beginning with no other."""
        self._asked += 1
        seed = f"{os.getpid()} {self._asked}"
        asked = messages(self._shape, self._endpoint.scale, seed, "plan")
        return self._endpoint.body(asked, self._shape.output_tokens)

    def saturated(self, clients: int, requests: int) -> float:
        """Requests a second while so many clients ask without a pause."""
        spec = LoadSpec(clients, requests)
        result = run_load(self._endpoint.client, spec, self.body, lambda _: None)
        return figures(result, LatencyTarget()).requests_per_s

    def at_random(self, rate: float, requests: int, seed: int) -> list[float]:
        """Seconds to the first token of requests that arrive at random; the first fifth does not count."""

        async def run() -> list[RequestSample]:
            draw, tasks = random.Random(seed), []
            at_s = time.perf_counter()
            for _ in range(requests):
                at_s += draw.expovariate(rate)
                await asyncio.sleep(at_s - time.perf_counter())
                tasks.append(asyncio.create_task(self._endpoint.client.ask(self.body())))
            return await asyncio.gather(*tasks)

        found = asyncio.run(run())
        return [one.ttft_s for one in found[requests // 5 :]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="MODEL|URL")
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--shape", default="100+40")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=120, help="of each load and round")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each point of the sweep")
    asked = parser.parse_args()
    found = _check(asked)
    print(json.dumps(found))
    return 0 if found["ok"] else 1


def _check(asked: argparse.Namespace) -> dict[str, Any]:
    shape = parse_shape(asked.shape)
    levels = [1 << power for power in range(10) if 1 << power <= asked.parallel]
    variant = BenchVariant(asked.model, asked.model, {}, asked.parallel)
    spec = SweepSpec(
        variants=(variant,), shapes=(shape,), clients=tuple(levels), seconds=asked.seconds
    )
    points, most = [], []
    waits_s: dict[float, list[float]] = {load: [] for load in asked.loads}
    with _open(variant) as (endpoint, _):
        load = Load(prepared(endpoint, "plan"), shape)
        for number in range(asked.rounds):
            sweep = Sweep(spec, _standing(endpoint), lambda _: None)
            sweep.run()
            points += sweep.points
            most.append(load.saturated(asked.parallel * _BEYOND, 2))
            for share in asked.loads:
                rate = share * statistics.median(most)
                waits_s[share] += load.at_random(rate, asked.requests, number)
    machine = MachineRecord.of(usable_machine())
    served = tuple(sweep.served.values())
    record = BenchRecord(at=now(), machine=machine, spec=spec, served=served, points=tuple(points))
    costs = measured_source(record).costs
    prompt = statistics.fmean(point.figures.prompt_tokens for point in points)
    lengths = RequestLengths(prompt, shape.output_tokens)
    saturation, predicted = statistics.median(most), capacity(costs, lengths).requests_per_s
    print(f"saturation: {saturation:.2f} requests a second, predicted {predicted:.2f}")
    rows, ok = [], abs(predicted / saturation - 1) <= _WANTED_SATURATION
    for share, measured in waits_s.items():
        queue = simulate(costs, lengths, share * saturation)
        told = queue.ttft_p95_ms if queue is not None else float("inf")
        cuts = statistics.quantiles(measured, n=100, method="inclusive")
        p95 = cuts[94] * 1e3
        ok = ok and abs(told / p95 - 1) <= _WANTED_P95
        rows.append({"load": share, "p50_ms": cuts[49] * 1e3, "p95_ms": p95, "predicted_ms": told})
        print(
            f"load {share:.0%}: p95 of TTFT {p95:.0f} ms, predicted {told:.0f} ({told / p95:.2f})"
        )
    return {"saturation": saturation, "predicted": predicted, "loads": rows, "ok": ok}


@contextmanager
def _open(variant: BenchVariant) -> "Iterator[tuple[BenchEndpoint, MemoryRoof | None]]":
    if is_running(variant.model):
        yield BenchEndpoint(variant.model), None
        return
    command = ServerCommand(variant.model, variant.settings, variant.parallel)
    with server_process(command, os.environ) as url:
        yield BenchEndpoint(url, own=True), None


def _standing(endpoint: BenchEndpoint) -> Any:  # noqa: ANN401 - the type of OpenServer
    """Gives the sweep a server that runs already."""

    @contextmanager
    def give(_: BenchVariant) -> "Iterator[tuple[BenchEndpoint, MemoryRoof | None]]":
        yield endpoint, None

    return give


if __name__ == "__main__":
    sys.exit(main())
