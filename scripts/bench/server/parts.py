"""Measurements of servers, in rounds that alternate between them; figures are medians."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from localchat.measure.workload import prose
from scripts.bench.server.client import Body, alone, chat, crowd, together
from scripts.bench.server.prompts import passage
from scripts.bench.server.servers import Served, settle

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


def host_streams(streams: int, tokens: int, label: str, fields: Body) -> Measure:
    """Clients with three answers each, over steps that compute nothing: CPU per token, rate, first token."""

    def measure(served: Served, number: int) -> dict[str, float]:
        clients = []
        for index in range(streams):
            # First answers of different lengths, so that later ones begin and end in different steps.
            lengths = (1 + tokens * index // streams, tokens, tokens)
            bodies = [
                chat(f"{number}, {index}, {turn}: tell me something", length, **fields)
                for turn, length in enumerate(lengths)
            ]
            for body in bodies:
                # A real client leaves the guard against loops on.
                del body["ignore_eos"]
            clients.append(bodies)
        before_s = (served.cpu_s(), *served.engine_cpu_s())
        spent_s, answers = crowd(served.port, clients)
        after_s = (served.cpu_s(), *served.engine_cpu_s())
        made = sum(answer.tokens for answer in answers)
        server, engine, steps = (
            (after - before) / made * 1e6 for before, after in zip(before_s, after_s, strict=True)
        )
        return {
            f"{label}: server CPU us/token": server,
            f"{label}: engine CPU us/token": engine,
            f"{label}: of it the thread of the steps": steps,
            f"{label}: tok/s": made / spent_s,
            f"{label}: tokens per event": made / sum(answer.events for answer in answers),
            f"{label}: ms to first token": statistics.median(one.first_s for one in answers) * 1e3,
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


# ---------------------------------------------------------------------------- with a real model


_DRAFT_COUNTERS = ("drafted", "accepted")


class Case(NamedTuple):
    """Clients that ask at the same time, each once."""

    label: str
    clients: int
    tokens: int
    """Length of each answer."""
    fields: Body
    """Sampling and options of the requests."""
    prompts: Iterator[str]


def model_case(case: Case, served: Sequence[Served]) -> dict[str, dict[str, float]]:
    """Measure servers in turn with the same prompts: tok/s, and CPU time per token. Figure, server, value."""
    bodies = [
        chat(prompt, case.tokens, **case.fields) for prompt in islice(case.prompts, case.clients)
    ]
    figures: dict[str, dict[str, float]] = {}
    for server in served:
        before_drafts = {name: server.counter(name) for name in _DRAFT_COUNTERS}
        before_s = server.cpu_s()
        all_before_s = server.all_cpu_s()
        spent_s, answers = together(server.port, bodies)
        server_ms = (server.cpu_s() - before_s) * 1e3
        all_ms = (server.all_cpu_s() - all_before_s) * 1e3
        tokens = sum(answer.tokens for answer in answers)
        rate = tokens / spent_s
        if case.clients == 1:
            rate = answers[0].tokens_per_s
        values = {
            "tok/s": rate,
            "CPU ms per token, all processes": all_ms / tokens,
        }
        # The rival is one process.
        if server_ms < all_ms / 2:
            values["CPU ms per token, server process"] = server_ms / tokens
        for name, before in before_drafts.items():
            # Times differ from run to run and from prompt to prompt by more than drafts cost.
            count = (server.counter(name) or 0) - (before or 0)
            if count:
                values[f"draft tokens per 100 tokens, {name}"] = 100 * count / tokens
        all_after_s = server.all_cpu_s()
        settle(served)
        idle_ms = (server.all_cpu_s() - all_after_s) * 1e3
        if idle_ms > all_ms / 20:
            values["CPU ms per token, after the answers"] = idle_ms / tokens
        for name, value in values.items():
            figures.setdefault(f"{case.label}: {name}", {})[server.name] = value
    return figures


def model_first_tokens(
    prompt_words: dict[int, int], number: int, served: Sequence[Served]
) -> dict[str, dict[str, float]]:
    """Measure time to first token of cold prompts. prompt_words: words of a prompt by its tokens."""
    figures: dict[str, dict[str, float]] = {}
    for server in served:
        for tokens, words in prompt_words.items():
            before_s = server.all_cpu_s()
            # With one number, a shorter prompt would be the start of a longer one.
            text = passage(words, number + tokens)
            cold = alone(server.port, chat(text, 2, temperature=0))
            cpu_ms = (server.all_cpu_s() - before_s) * 1e3
            name = f"first token of {tokens} tokens"
            figures.setdefault(f"{name}: ms", {})[server.name] = cold.first_s * 1e3
            per_token_ms = cpu_ms / cold.prompt_tokens
            figures.setdefault(f"{name}: CPU ms per token", {})[server.name] = per_token_ms
            settle(served)
    return figures


def model_speed(served: Served) -> tuple[float, float]:
    """Measure seconds per prompt token and per answer token, by a request of its own."""
    answer = alone(served.port, chat(passage(150, 98), 16, temperature=0))
    return answer.first_s / answer.prompt_tokens, 1 / answer.tokens_per_s


def model_turns(
    words: int, number: int, label: str, sampling: Body, pause_s: float, served: Sequence[Served]
) -> dict[str, dict[str, float]]:
    """Measure time to first token of a second turn, behind a passage of this many words.

    pause_s: time in which a person reads the answer and writes the next question.
    """
    first_ms: dict[str, float] = {}
    cpu_ms: dict[str, float] = {}
    pause_ms: dict[str, float] = {}
    opening = f"{passage(words, 20 + number)}\n\nWhat is this text about, {label}?"
    for server in served:
        first = alone(server.port, chat(opening, 32, **sampling))
        second = chat(opening, 2, **sampling)
        second["messages"] += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Which of its points do you doubt most?"},
        ]
        answered_s = server.all_cpu_s()
        time.sleep(pause_s)
        before_s = server.all_cpu_s()
        pause_ms[server.name] = (before_s - answered_s) * 1e3
        first_ms[server.name] = alone(server.port, second).first_s * 1e3
        cpu_ms[server.name] = (server.all_cpu_s() - before_s) * 1e3
        settle(served)
    name = f"second turn, {label}"
    figures = {f"{name}: ms to first token": first_ms, f"{name}: CPU ms": cpu_ms}
    if pause_s:
        # A server may work while the person reads.
        figures[f"{name}: CPU ms in the pause"] = pause_ms
    return figures


def words_for(served: Served, tokens: Sequence[int]) -> dict[int, int]:
    """Return how many words of a passage make prompts of these lengths."""
    count = alone(served.port, chat(passage(400, 99), 1, temperature=0)).prompt_tokens
    return {length: round(length * 400 / count) for length in tokens}


def model_long(words: int, clients: int, served: Sequence[Served]) -> dict[str, dict[str, float]]:
    """Measure clients with long prompts of their own: tok/s of the answers, CPU time, and our preemptions."""
    figures: dict[str, dict[str, float]] = {}
    bodies = [
        chat(passage(words, 60 + number), 32, temperature=0.8, top_k=40, repeat_penalty=1.0)
        for number in range(clients)
    ]
    for server in served:
        before_s = server.all_cpu_s()
        spent_s, answers = together(server.port, bodies)
        tokens = sum(answer.tokens + answer.prompt_tokens for answer in answers)
        values = {
            "tok/s, prompts and answers": tokens / spent_s,
            "CPU ms per token": (server.all_cpu_s() - before_s) / tokens * 1e3,
        }
        if (preemptions := server.counter("preemptions")) is not None:
            values["preemptions"] = preemptions
        for name, value in values.items():
            figures.setdefault(f"{clients} long prompts: {name}", {})[server.name] = value
        settle(served)
    return figures


def model_memory(served: Sequence[Served]) -> dict[str, dict[str, float]]:
    """Measure the resident memory of servers and engines."""
    return {"memory: MiB": {server.name: server.all_bytes() / (1 << 20) for server in served}}
