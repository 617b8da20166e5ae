"""Measurements of servers, in rounds that alternate between them; figures are medians."""

import statistics
import zlib
from collections.abc import Callable, Sequence

from localchat.measure.workload import prose
from scripts.bench.server.client import Body, alone, chat, together
from scripts.bench.server.servers import Served

Figures = dict[str, dict[str, float]]
"""Figure, server, value."""
Measure = Callable[[Served, int], dict[str, float]]
"""Measures one server in one round: figures by name."""


def rounds(servers: Sequence[Served], count: int, measure: Measure) -> Figures:
    """Medians over `count` rounds; in every other one the servers take turns backwards."""
    seen: dict[str, dict[str, list[float]]] = {}
    for number in range(count):
        for served in servers if number % 2 == 0 else reversed(servers):
            for name, value in measure(served, number).items():
                seen.setdefault(name, {}).setdefault(served.name, []).append(value)
    return {
        name: {server: statistics.median(values) for server, values in by_server.items()}
        for name, by_server in seen.items()
    }


# ---------------------------------------------------------------------------- with a scripted engine


def wire_streams(streams: int, tokens: int, label: str) -> Measure:
    """Streams at once over a scripted engine: rate, and CPU of the server a token."""

    def measure(served: Served, number: int) -> dict[str, float]:
        bodies = [chat(f"{number}, {at}", tokens, speculation=False) for at in range(streams)]
        before_s = served.cpu_s()
        spent_s, answers = together(served.port, bodies)
        cpu_s = served.cpu_s() - before_s
        made = sum(answer.tokens for answer in answers)
        return {
            f"{label}: tok/s": made / spent_s,
            f"{label}: server CPU us/token": cpu_s / made * 1e6,
        }

    return measure


def wire_requests(names: dict[str, str | None], count: int) -> Measure:
    """Short requests one after the other, by the model name that they carry: milliseconds and CPU."""

    def measure(served: Served, number: int) -> dict[str, float]:
        found = {}
        for label, name in names.items():
            body = chat(f"round {number}", 1, **({} if name is None else {"model": name}))
            before_s = served.cpu_s()
            taken = [alone(served.port, body).end_s for _ in range(count)]
            found[f"request {label}: ms"] = statistics.median(taken) * 1e3
            found[f"request {label}: server CPU ms"] = (served.cpu_s() - before_s) / count * 1e3
        return found

    return measure


def after_requests(served: Served, count: int, *, clients: int = 16) -> dict[str, float]:
    """Latency and the server's memory, before and after `count` short requests with names and prompts of their
    own. The memory of the engine does not count: the scripted backend keeps all its plans for tests."""

    def one_by_one(seed: int) -> tuple[float, float]:
        """Median latency in ms, and the server's CPU time in ms a request."""
        before_s = served.cpu_s()
        taken = [alone(served.port, chat(prose(8, seed + at), 1)).end_s for at in range(200)]
        return statistics.median(taken) * 1e3, (served.cpu_s() - before_s) / len(taken) * 1e3

    def burst(first: int, size: int) -> None:
        bodies: list[Body] = [
            chat(prose(16, first + at), 4, model=f"name {first + at}") for at in range(size)
        ]
        together(served.port, bodies)

    for at in range(0, 500, clients):  # until buffers and pools have their size
        burst(at, clients)
    (before_ms, before_cpu_ms), before = one_by_one(10_000_000), served.rss_bytes()
    for at in range(0, count, clients):
        burst(1_000_000 + at, clients)
    (after_ms, after_cpu_ms), after = one_by_one(20_000_000), served.rss_bytes()
    return {
        f"after {count} requests: latency after / before": after_ms / before_ms,
        f"after {count} requests: server CPU after / before": after_cpu_ms / before_cpu_ms,
        f"after {count} requests: server grew by KiB": (after - before) / 1024,
    }


# ---------------------------------------------------------------------------- with a model


def model_streams(streams: int, tokens: int, label: str, sampling: Body) -> Measure:
    """Streams at once of a real model: all tokens over all time."""

    def measure(served: Served, number: int) -> dict[str, float]:
        # No part may find the prompts of another one in a cache.
        seed = zlib.crc32(f"{label} {streams} {number}".encode())
        bodies = [chat(prose(8, seed + at), tokens, **sampling) for at in range(streams)]
        spent_s, answers = together(served.port, bodies)
        made = sum(answer.tokens for answer in answers)
        rate = answers[0].tokens_per_s if streams == 1 else made / spent_s
        return {f"{streams} {'stream' if streams == 1 else 'streams'}, {label}: tok/s": rate}

    return measure


def model_turns(first_words: int, turn_words: int) -> Measure:
    """Time to first token of a cold prompt, and of a second turn behind a long first one."""

    def measure(served: Served, number: int) -> dict[str, float]:
        cold = alone(served.port, chat(prose(first_words, 77 + number), 2, temperature=0))
        opening = prose(turn_words, 777 + number)
        before = alone(served.port, chat(opening, 16, temperature=0))
        second = chat(opening, 2, temperature=0)
        second["messages"] += [
            {"role": "assistant", "content": before.text},
            {"role": "user", "content": "And what follows from it?"},
        ]
        turn = alone(served.port, second)
        return {
            f"first token of {cold.prompt_tokens // 100 * 100} tokens: ms": cold.first_s * 1e3,
            f"second turn behind {before.prompt_tokens // 100 * 100} tokens: ms": (
                turn.first_s * 1e3
            ),
        }

    return measure


def model_memory(served: Served, number: int) -> dict[str, float]:
    """Resident memory of the server and its engine."""
    return {"memory at the end: MiB": served.all_bytes() / (1 << 20)}
