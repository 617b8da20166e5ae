"""Load of one benchmark point.

In a closed loop, each client sends the next request after an answer. In an open loop, requests arrive at a
rate, whether or not earlier ones were answered. A disruption lets streams decode, and then sends long prompts.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

from localchat.errors import LocalchatError
from localchat.measure.client import BenchClient, RequestSample, is_refusal
from localchat.measure.statistics import LoadResult

BodyOf = Callable[[int, int], dict[str, Any]]
"""Builds the body of a client's n-th request. Both numbers count from 0."""

_CALM_EVENTS: Final = 24
"""Events of each stream before the burst of a disruption."""
_AFTER_FAILURE_S: Final = 0.5
"""Pause after a failed request, so that a failing server is not flooded."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Extent of one point."""

    clients: int
    requests: int | None = None
    """Requests of each client, or of an open loop.

    None for as many as start within `seconds`, at least one."""
    seconds: float = 10.0
    rate: float = 0.0
    """Requests per second of an open loop, which has no clients. 0 for a closed loop.

    Intervals are drawn from an exponential distribution, so that arrivals are a Poisson process.
    """
    seed: str = ""
    """Seed of the intervals."""


class Disruption(NamedTuple):
    """Recorded requests of streams and of the burst between them."""

    streams: LoadResult
    burst: list[RequestSample]
    burst_s: float
    """Time at which the burst was sent, on the clock of the samples."""


@dataclass(slots=True)
class LoadProgress:
    """Results so far of a running point, which its event loop updates."""

    samples: list[RequestSample] = field(default_factory=list)
    failed: int = 0
    began_s: float = 0.0


def run_load(
    client: BenchClient,
    spec: LoadSpec,
    body_of: BodyOf,
    on_answer: Callable[[LoadProgress], None],
) -> LoadResult:
    """Run a point to its end, and call `on_answer` after each answer. Blocks.

    Single failures are counted. Raises LocalchatError if the server rejects a request, or answers none.
    """
    return asyncio.run(_run(client, spec, body_of, on_answer))


def ask_each(client: BenchClient, bodies: list[dict[str, Any]]) -> list[RequestSample]:
    """Send requests one after the other, outside of a point. Raises LocalchatError."""

    async def run() -> list[RequestSample]:
        return [await client.ask(body) for body in bodies]

    return asyncio.run(run())


def run_disruption(
    client: BenchClient, streams: list[dict[str, Any]], burst: list[dict[str, Any]]
) -> Disruption:
    """Send the burst once all streams decode. Blocks. Raises LocalchatError."""
    return asyncio.run(_disrupt(client, streams, burst))


async def _disrupt(
    client: BenchClient, streams: list[dict[str, Any]], burst: list[dict[str, Any]]
) -> Disruption:
    counts = [0] * len(streams)
    all_decode = asyncio.Event()

    def on_text(number: int) -> None:
        counts[number] += 1
        if min(counts) >= _CALM_EVENTS:
            all_decode.set()

    began_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(client.ask(body, partial(on_text, number)))
                for number, body in enumerate(streams)
            ]
            decoding = asyncio.ensure_future(all_decode.wait())
            # Short answers may end before the slowest stream has started.
            first: list[asyncio.Future[Any]] = [decoding, *running]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            decoding.cancel()
            burst_s = time.perf_counter()
            prompts = [group.create_task(client.ask(body)) for body in burst]
    except* LocalchatError as problems:
        raise problems.exceptions[0] from None
    samples = [task.result() for task in running]
    result = LoadResult(samples, 0, time.perf_counter() - began_s)
    return Disruption(result, [task.result() for task in prompts], burst_s)


async def _run(
    client: BenchClient,
    spec: LoadSpec,
    body_of: BodyOf,
    on_answer: Callable[[LoadProgress], None],
) -> LoadResult:
    progress = LoadProgress(began_s=time.perf_counter())
    failures: list[LocalchatError] = []

    def continues(sent: int) -> bool:
        if spec.requests is not None:
            return sent < spec.requests
        return sent == 0 or time.perf_counter() - progress.began_s < spec.seconds

    async def ask(number: int, sent: int) -> None:
        try:
            progress.samples.append(await client.ask(body_of(number, sent)))
        except LocalchatError as problem:
            if is_refusal(problem):
                raise
            failures.append(problem)
            progress.failed += 1
            await asyncio.sleep(_AFTER_FAILURE_S)
        on_answer(progress)

    async def run_client(number: int) -> None:
        sent = 0
        while continues(sent):
            await ask(number, sent)
            sent += 1

    async def run_arrivals(group: asyncio.TaskGroup) -> None:
        draw = random.Random(spec.seed)
        due_s = progress.began_s
        sent = 0
        while continues(sent):
            due_s += draw.expovariate(spec.rate)
            await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
            group.create_task(ask(sent, 0))
            sent += 1

    try:
        async with asyncio.TaskGroup() as group:
            if spec.rate:
                group.create_task(run_arrivals(group))
            for number in range(spec.clients):
                group.create_task(run_client(number))
    except* LocalchatError as problems:
        raise problems.exceptions[0] from None
    ended_s = time.perf_counter()
    if not progress.samples:
        raise failures[0]
    return LoadResult(progress.samples, progress.failed, ended_s - progress.began_s)
