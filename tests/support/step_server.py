"""A server of steps for tests, written plainly: every step is taken, and every request keeps its tokens.

Its times are known, so that what a plan predicts from its measured points can be compared with them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from localchat.measure.capacity import MIN_CHUNK
from localchat.measure.client import RequestSample
from localchat.measure.statistics import LatencyTarget, LoadResult, figures
from localchat.measure.sweep import Point, PointKey


class StepServer(NamedTuple):
    """Costs of a server. A step takes the weights, each stream it decodes, and each prompt token it reads."""

    weights_s: float
    stream_s: float
    prompt_token_s: float
    slots: int
    budget_s: float


@dataclass(slots=True)
class _Request:
    client: int
    began_s: float
    left: int
    arrivals_s: list[float] = field(default_factory=list)


class Lengths(NamedTuple):
    """Tokens of every request."""

    prompt: int
    output: int


Next = Callable[[int, float], float | None]
"""When the next request of a client begins, after an answer that ended at this time."""


def closed_loop(server: StepServer, lengths: Lengths, clients: int, requests: int) -> Point:
    """A point of a benchmark: each client asks again as soon as it is answered."""
    left = requests - clients

    def again(_client: int, now_s: float) -> float | None:
        nonlocal left
        left -= 1
        return now_s if left >= 0 else None

    samples = _serve(server, lengths, [0.0] * clients, again)
    result = LoadResult(samples, 0, max(one.arrivals_s[-1] for one in samples))
    return Point(PointKey("m", "chat", 0, clients), 0, figures(result, LatencyTarget()))


def at_random(
    server: StepServer, lengths: Lengths, requests_per_s: float, requests: int, seed: int
) -> list[RequestSample]:
    """Requests that arrive at random, without the first fifth."""
    draw, now_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(requests):
        now_s += draw.expovariate(requests_per_s)
        arrivals.append(now_s)
    samples = _serve(server, lengths, arrivals, lambda _client, _now_s: None)
    return sorted(samples, key=lambda one: one.began_s)[requests // 5 :]


def _serve(
    server: StepServer, lengths: Lengths, arrivals_s: list[float], again: Next
) -> list[RequestSample]:
    coming = [_Request(at, begun, lengths.prompt) for at, begun in enumerate(arrivals_s)]
    coming.reverse()
    reading: list[_Request] = []
    decoding: list[_Request] = []
    samples: list[RequestSample] = []
    now_s = 0.0
    while coming or reading or decoding:
        if not reading and not decoding:
            now_s = max(now_s, coming[-1].began_s)
        while (
            coming and coming[-1].began_s <= now_s and len(reading) + len(decoding) < server.slots
        ):
            reading.append(coming.pop())
        decode_s = server.weights_s + server.stream_s * max(len(decoding), 1)
        most_s = server.budget_s - (decode_s if decoding else 0.0)
        room, taken = max(round(most_s / server.prompt_token_s), MIN_CHUNK), 0
        first: list[_Request] = []
        for one in list(reading):
            read = min(one.left, room - taken)
            one.left -= read
            taken += read
            if not one.left:
                reading.remove(one)
                first.append(one)
        if not decoding and not first:
            decode_s = 0.0
        now_s += decode_s + taken * server.prompt_token_s
        for one in [*decoding, *first]:
            one.arrivals_s.append(now_s)
        decoding += first
        for one in [each for each in decoding if len(each.arrivals_s) >= lengths.output]:
            decoding.remove(one)
            samples.append(
                RequestSample(
                    began_s=one.began_s,
                    arrivals_s=tuple(one.arrivals_s),
                    prompt_tokens=lengths.prompt,
                    completion_tokens=lengths.output,
                )
            )
            if (begins_s := again(one.client, now_s)) is not None:
                coming.insert(0, _Request(one.client, begins_s, lengths.prompt))
    return samples
