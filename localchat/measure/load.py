"""Runs one point of a benchmark: a number of clients, each of which sends its next request after an answer."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from localchat.errors import LocalchatError
from localchat.measure.client import BenchClient, RequestSample, is_refusal
from localchat.measure.statistics import LoadResult

BodyOf = Callable[[int, int], dict[str, Any]]
"""The body of the n-th request of a client; both count from 0."""

_AFTER_FAILURE_S = 0.5
"""A server that refuses everybody is not asked as fast as it can refuse."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Extent of one point."""

    clients: int
    requests: int | None = None
    """Of each client; None: as many as begin within `seconds`, at least one."""
    seconds: float = 10.0


@dataclass(slots=True)
class LoadProgress:
    """What a point has done so far, for whoever watches; changed by the event loop that runs it."""

    samples: list[RequestSample] = field(default_factory=list)
    failed: int = 0
    began_s: float = 0.0


def run_load(
    client: BenchClient, spec: LoadSpec, body_of: BodyOf, changed: Callable[[LoadProgress], None]
) -> LoadResult:
    """Run a point to its end. Blocks. Raises LocalchatError where the server refuses a request, or none was
    answered; single failures are counted. changed: called after each answer."""
    return asyncio.run(_run(client, spec, body_of, changed))


def ask_each(client: BenchClient, bodies: list[dict[str, Any]]) -> list[RequestSample]:
    """Ask one after the other, unmeasured. Raises LocalchatError."""

    async def run() -> list[RequestSample]:
        return [await client.ask(body) for body in bodies]

    return asyncio.run(run())


async def _run(
    client: BenchClient, spec: LoadSpec, body_of: BodyOf, changed: Callable[[LoadProgress], None]
) -> LoadResult:
    progress = LoadProgress(began_s=time.perf_counter())
    failures: list[LocalchatError] = []

    async def work(number: int) -> None:
        asked = 0
        while _goes_on(spec, asked, progress.began_s):
            try:
                progress.samples.append(await client.ask(body_of(number, asked)))
            except LocalchatError as problem:
                if is_refusal(problem):
                    raise
                failures.append(problem)
                progress.failed += 1
                await asyncio.sleep(_AFTER_FAILURE_S)
            asked += 1
            changed(progress)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(spec.clients):
                group.create_task(work(number))
    except* LocalchatError as problems:
        raise problems.exceptions[0] from None
    ended_s = time.perf_counter()
    if not progress.samples:
        raise failures[0]
    return LoadResult(progress.samples, progress.failed, ended_s - progress.began_s)


def _goes_on(spec: LoadSpec, asked: int, began_s: float) -> bool:
    if spec.requests is not None:
        return asked < spec.requests
    return asked == 0 or time.perf_counter() - began_s < spec.seconds
