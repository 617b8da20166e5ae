"""Measures tiers of the KV cache: first tokens from pinned memory and from the disk, and what writing costs."""

import statistics
import time

import numpy as np
import torch

from localchat.backend_api.interface import LoadBlock, Runner, SaveBlock, StepPlan
from scripts.bench.cuda.driving import Engine, config_of, random_tokens, runner_of
from scripts.bench.cuda.speed import LONG, SHORT, MetricsSnapshot

LENGTHS = (7_000, 30_000)
POOL, CONTEXT = 34_000, 32_768
"""A pool of little more than one prompt: the next one evicts it."""
RAM_BYTES = 6_000_000_000
STREAMS = (1, 8, 32)
ROUNDS = 5


def warm(results: MetricsSnapshot) -> None:
    """warm_ttft_ms_* computed and from RAM, with and without FP8; warm_rate_* with over without the tier."""
    for name, kv_type in (("kv16", None), ("kv8", "fp8")):
        config = config_of("awq")
        runner = runner_of(
            config, slots=max(STREAMS), kv_tokens=POOL, context=CONTEXT, kv_type=kv_type,
            cache_ram_bytes=RAM_BYTES,
        )  # fmt: skip
        engine = Engine(runner, config.vocabulary)
        for length in LENGTHS:
            _first_tokens(engine, name, length, results)
        if kv_type is None:
            _decode(runner, config.vocabulary, results)
            _copies(engine, results)
        runner.close()
        del runner, engine
        torch.cuda.empty_cache()


def _first_tokens(engine: Engine, name: str, length: int, results: MetricsSnapshot) -> None:
    draw = np.random.default_rng(length)
    prompts = [random_tokens(draw, length) for _ in range(2)]
    filler = random_tokens(draw, LENGTHS[-1])
    found: dict[str, list[float]] = {}
    for round_ in range(3):
        for prompt in prompts:
            asked = engine.ask(prompt, 8, salt="warm")
            engine.settle()
            state = "from RAM" if round_ else "computed"
            found.setdefault(state, []).append((asked.times_s[0] - asked.begun_s) * 1e3)
            engine.ask(filler, 1, salt="filler")
            engine.settle()
    for state, times in found.items():
        # Kernels of the first prompt are new.
        middle = statistics.median(times[1:])
        results[f"warm_ttft_ms_{name}_{length}_{state}"] = middle
        print(f"{name}, {length:,} tokens, {state}: {middle:.1f} ms", flush=True)


def _decode(runner: Runner, vocabulary: int, results: MetricsSnapshot) -> None:
    """Rates of decoding with the tier over those without, in turns."""
    engines = {tiers: Engine(runner, vocabulary, tiers=tiers) for tiers in (True, False)}
    draw = np.random.default_rng(5)
    for streams in STREAMS:
        times: dict[bool, list[float]] = {True: [], False: []}
        for round_ in range(ROUNDS + 2):
            for tiers in (True, False) if round_ % 2 else (False, True):
                spent = []
                for most in (LONG, SHORT):
                    began_s = time.perf_counter()
                    asked = [
                        engines[tiers].ask(random_tokens(draw, 128), most) for _ in range(streams)
                    ]
                    while any(one.tokens < most for one in asked):
                        engines[tiers].turn()
                    spent.append(time.perf_counter() - began_s)
                    engines[tiers].settle()
                if round_ > 1:
                    times[tiers].append(spent[0] - spent[1])
        share = statistics.median(times[False]) / statistics.median(times[True])
        results[f"warm_rate_bs{streams}"] = share
        print(f"decode of {streams} streams, with the tier: {share:.4f} of without", flush=True)


def _copies(engine: Engine, results: MetricsSnapshot) -> None:
    """Rates of copies to and from pinned memory through the runner."""
    runner, count = engine.runner, 400
    for name, kind in (("save", SaveBlock), ("load", LoadBlock)):
        for _ in range(2):
            ops = tuple(kind(number, number) for number in range(count))
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            runner.launch(StepPlan(0, memory=ops))
            runner.collect()
            queued_s = time.perf_counter() - began_s
            torch.cuda.synchronize()
            spent_s = time.perf_counter() - began_s
        size = count * runner.capabilities.block_tokens * runner.capabilities.bytes_per_token
        results[f"warm_{name}_gb_s"] = size / spent_s / 1e9
        print(f"{name}: {size / spent_s / 1e9:.1f} GB/s, {count} blocks queued in "
              f"{queued_s * 1e3:.1f} ms", flush=True)  # fmt: skip
