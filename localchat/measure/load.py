"""Load of one benchmark point: clients that each send the next request after an answer."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from localchat.errors import LocalchatError
from localchat.measure.client import BenchClient, RequestSample, is_refusal
from localchat.measure.statistics import LoadResult

BodyOf = Callable[[int, int], dict[str, Any]]
"""Builds the body of a client's n-th request. Both numbers count from 0."""

_AFTER_FAILURE_S: Final = 0.5
"""Pause after a failed request, so that a failing server is not flooded."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Extent of one point."""

    clients: int
    requests: int | None = None
    """Requests of each client; None for as many as start within `seconds`, at least one."""
    seconds: float = 10.0


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

    async def run_client(number: int) -> None:
        sent = 0
        while continues(sent):
            try:
                progress.samples.append(await client.ask(body_of(number, sent)))
            except LocalchatError as problem:
                if is_refusal(problem):
                    raise
                failures.append(problem)
                progress.failed += 1
                await asyncio.sleep(_AFTER_FAILURE_S)
            sent += 1
            on_answer(progress)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(spec.clients):
                group.create_task(run_client(number))
    except* LocalchatError as problems:
        raise problems.exceptions[0] from None
    ended_s = time.perf_counter()
    if not progress.samples:
        raise failures[0]
    return LoadResult(progress.samples, progress.failed, ended_s - progress.began_s)
