"""Decoding, time to first token, prefix caching, chunked prefill, and speculation by replay."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from scripts.bench.cuda.driving import (
    GPU,
    Asked,
    Engine,
    ReplaySampler,
    config_of,
    random_tokens,
    runner_of,
    shrunk,
)
from scripts.bench.llamacpp.edits import edited

LONG, SHORT = 257, 1
PROMPT = 128
WARM = 4
MetricsSnapshot = dict[str, float]


def decode_rate(engine: Engine, streams: int, prompt: int = PROMPT, rounds: int = 3) -> float:
    """tok/s of all streams: the difference of 257 and 1 tokens, median of `rounds`."""
    draw = np.random.default_rng(streams)

    def ask(most: int) -> None:
        for _ in range(streams):
            engine.ask(random_tokens(draw, prompt), most)
        engine.settle()

    return walls_rate(ask, streams * (LONG - SHORT), rounds)


def walls_rate(ask: Callable[[int], None], tokens: int, rounds: int = 3) -> float:
    """tok/s from the difference of what `ask` takes for 257 tokens and for 1, which is `tokens` in all,
    median of `rounds`.
    """
    for most in (LONG, SHORT, SHORT):  # kernels are compiled and graphs captured
        ask(most)
    rates = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        ask(LONG)
        between_s = time.perf_counter()
        ask(SHORT)
        rates.append(tokens / (2 * between_s - began_s - time.perf_counter()))
    return statistics.median(rates)


def first_token_ms(engine: Engine, prompt: int, rounds: int = 3) -> float:
    """From the request at a loaded engine to its first token, median of `rounds`."""
    draw = np.random.default_rng(prompt)
    times = []
    for _ in range(WARM + rounds):
        asked = engine.ask(random_tokens(draw, prompt), 1)
        engine.settle()
        times.append((asked.times_s[0] - asked.begun_s) * 1e3)
    return statistics.median(times[WARM:])


def decoding(engine: Engine, results: MetricsSnapshot, streams: tuple[int, ...]) -> None:
    """decode_bs*, decode_bs1_ctx7000, ttft_ms_*."""
    for size in streams:
        results[f"decode_bs{size}"] = decode_rate(engine, size)
        print(f"decode {size} streams: {results[f'decode_bs{size}']:.0f} tok/s", flush=True)
    results["decode_bs1_ctx7000"] = decode_rate(engine, 1, 7000)
    print(f"decode at 7,000: {results['decode_bs1_ctx7000']:.0f} tok/s", flush=True)
    for size in (128, 512, 2048, 7000):
        results[f"ttft_ms_{size}"] = first_token_ms(engine, size)
        print(f"first token of {size}: {results[f'ttft_ms_{size}']:.1f} ms", flush=True)


def half_precision(results: MetricsSnapshot) -> None:
    """bf16_bs1."""
    config = config_of()
    runner = runner_of(config, slots=4, kv_tokens=16384)
    engine = Engine(runner, config.vocabulary)
    results["bf16_bs1"] = decode_rate(engine, 1)
    results["bf16_ttft_ms_2048"] = first_token_ms(engine, 2048)
    print(f"bf16, 1 stream: {results['bf16_bs1']:.0f} tok/s, "
          f"2,048: {results['bf16_ttft_ms_2048']:.1f} ms", flush=True)  # fmt: skip
    runner.close()


def prefix_caching(engine: Engine, results: MetricsSnapshot, clients: int = 64) -> None:
    """Clients that share 250 of 327 prompt tokens and write 128, with the cache and without. The first
    two rounds, which compile kernels and capture graphs, are printed but not counted.
    """
    draw = np.random.default_rng(250)
    for name in ("off", "on") * 3:
        shared = random_tokens(draw, 250)
        if name == "on":
            engine.ask(shared, 1, salt="shared")
            engine.settle()
        began_s = time.perf_counter()
        asked = [
            engine.ask(
                (*shared, *random_tokens(draw, 77)), 128,
                **({"salt": "shared"} if name == "on" else {}),
            )
            for _ in range(clients)
        ]  # fmt: skip
        engine.settle()
        seconds = time.perf_counter() - began_s
        first = [(one.times_s[0] - one.begun_s) * 1e3 for one in asked]
        results[f"prefix_{name}_tok_s"] = clients * 128 / seconds
        results[f"prefix_{name}_ttft_ms"] = statistics.median(first)
        print(f"64 clients, prefix caching {name}: {clients * 128 / seconds:.0f} tok/s, first "
              f"token {statistics.median(first):.0f} ms (median)", flush=True)  # fmt: skip


def gaps(runner_step: int, results: MetricsSnapshot, name: str, engine: Engine) -> None:
    """8 streams write while 8 prompts of 7,000 tokens arrive: gaps between their tokens, in ms."""
    draw = np.random.default_rng(7000)
    writers = [engine.ask(random_tokens(draw, PROMPT), 1200) for _ in range(8)]
    engine.settle(lambda: all(one.tokens > 40 for one in writers))
    mark_s = time.perf_counter()
    late = [engine.ask(random_tokens(draw, 7000), 8) for _ in range(8)]
    engine.settle(lambda: all(one.tokens >= 8 for one in late))
    end_s = max(one.ended_s for one in late)
    engine.settle()
    found = sorted(gap for one in writers for gap in _gaps(one, mark_s, end_s))
    results[f"gap_{name}_worst_ms"] = found[-1]
    results[f"gap_{name}_p95_ms"] = found[int(0.95 * len(found))]
    results[f"gap_{name}_ttft_s"] = statistics.median(o.times_s[0] - o.begun_s for o in late)
    print(f"gaps, steps of {runner_step} ({name}): worst {found[-1]:.1f} ms, p95 "
          f"{results[f'gap_{name}_p95_ms']:.1f}, prompts' first token "
          f"{results[f'gap_{name}_ttft_s']:.2f} s (median)", flush=True)  # fmt: skip


def _gaps(one: Asked, begin_s: float, end_s: float) -> list[float]:
    times = [at for at in one.times_s if begin_s - 0.05 <= at <= end_s + 0.05]
    return [(b - a) * 1e3 for a, b in pairwise(times)]


def chunked_prefill(results: MetricsSnapshot, engine: Engine) -> None:
    """Gaps with prompts split into chunks, and with whole prompts in a step."""
    can = engine.runner.capabilities
    for _ in range(3):  # kernels are compiled and graphs captured
        gaps(can.max_step_tokens, results, "chunked", engine)
    runner = engine.runner
    runner.capabilities = shrunk(can, step_target_s=10.0, shared_step_target_s=10.0)
    whole = Engine(runner, engine.input_processor._model.tokenizer.vocab_size)
    for _ in range(3):  # learn what a token takes
        whole.ask(random_tokens(np.random.default_rng(1), 4000), 1)
        whole.settle()
    gaps(can.max_step_tokens, results, "whole", whole)
    runner.capabilities = can


def speculation(runner_vocabulary: int, results: MetricsSnapshot, engine: Engine) -> None:
    """Replayed texts with and without drafts: an edited file, a quoted answer, random text."""
    draw = np.random.default_rng(3)
    source = random_tokens(draw, 700)
    question = random_tokens(draw, 60)
    quoted = (*random_tokens(draw, 40), *source[200:420], *random_tokens(draw, 40))
    cases = {
        "edit": (*question, *source, *edited(source, draw)),
        "quote": (*source, *question, *quoted),
        "random": (*question, *random_tokens(draw, 500)),
    }
    prompts = {"edit": 760, "quote": 760, "random": 60}
    sampler, graphs = engine.runner._sampler, engine.runner.graphs  # type: ignore[attr-defined]
    sampler.__class__ = ReplaySampler
    sampler.recorded = torch.zeros(4096, dtype=torch.int32, device=GPU)
    graphs.clear()
    for name, text in cases.items():
        sampler.recorded[: len(text)] = torch.tensor(text, dtype=torch.int32)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(4):
            for drafts in (False, True):
                asked = engine.ask(
                    text[: prompts[name]], len(text) - prompts[name], speculation=drafts
                )
                engine.settle()
                seconds[drafts].append(asked.times_s[-1] - asked.times_s[0])
        results[f"drafts_{name}"] = statistics.median(seconds[False][1:]) / statistics.median(
            seconds[True][1:]
        )
        print(f"drafts, {name}: {results[f'drafts_{name}']:.2f} times", flush=True)
    graphs.clear()
    sampler.recorded = None
    sampler.__class__ = ReplaySampler.__bases__[0]
