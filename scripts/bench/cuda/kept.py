"""Compares KV caches of 16 and 8 bits for one model: capacity, decode at 8,000 tokens of context, first
token.
"""

from dataclasses import dataclass

import numpy as np
import torch

from localchat.fit.kv_types import FP8
from scripts.bench.cuda.driving import Engine, config_of, random_tokens, runner_of
from scripts.bench.cuda.speed import LONG, SHORT, MetricsSnapshot, first_token_ms, walls_rate

KEPT = {"kv16": None, "kv8": FP8}
STREAMS = (1, 32)
PROMPT, CONTEXT = 7900, 8192
"""With 257 tokens written, 8,000 of context on average."""


def kept(results: MetricsSnapshot) -> None:
    """kv8_capacity (tokens in the same memory, relative to 16 bits), and for kv16 and kv8 bs1_ctx8000,
    bs32_ctx8000, ttft_2048 and ttft_7000 (ms), each of kv8 also as a share of kv16's: NAME_of_kv16.
    """
    for name, kv_type in KEPT.items():
        _figures(name, kv_type, results)
        torch.cuda.empty_cache()
    results["kv8_capacity"] = results.pop("kv16_token_bytes") / results.pop("kv8_token_bytes")
    print(f"tokens of the same memory: {results['kv8_capacity']:.3f} times", flush=True)
    for what in (*(f"bs{size}_ctx8000" for size in STREAMS), "ttft_2048", "ttft_7000"):
        results[f"kv8_{what}_of_kv16"] = share = results[f"kv8_{what}"] / results[f"kv16_{what}"]
        print(f"kv8 {what}: {share:.3f} of plain", flush=True)


def _figures(name: str, kv_type: str | None, results: MetricsSnapshot) -> None:
    config = config_of("awq")
    tokens = (max(STREAMS) + 1) * CONTEXT
    runner = runner_of(
        config, slots=max(STREAMS), kv_tokens=tokens, context=CONTEXT, kv_type=kv_type
    )
    pages = runner.capabilities.kv_tokens // runner.capabilities.block_tokens + 1
    results[f"{name}_token_bytes"] = runner.memory().kv_bytes / pages
    engine = Engine(runner, config.vocabulary)
    for size in STREAMS:
        results[f"{name}_bs{size}_ctx8000"] = rate = _cached_rate(engine, size)
        print(f"{name}, {size} streams at 8,000 tokens: {rate:.0f} tok/s", flush=True)
    for size in (2048, 7000):
        results[f"{name}_ttft_{size}"] = first_token_ms(engine, size)
        print(f"{name}, first token of {size}: {results[f'{name}_ttft_{size}']:.1f} ms", flush=True)
    runner.close()


@dataclass
class _Again:
    """Prompts that were computed before: asked again, they cost one token each."""

    engine: Engine
    prompts: list[tuple[int, ...]]

    def ask(self, most: int) -> None:
        for prompt in self.prompts:
            self.engine.ask(prompt, most, salt="kept")
        self.engine.settle()


def _cached_rate(engine: Engine, streams: int) -> float:
    """tok/s of all streams at 8,000 tokens with their prompts computed once: rounds of 257 and 1 tokens
    differ only in decoding.
    """
    draw = np.random.default_rng(streams)
    again = _Again(engine, [random_tokens(draw, PROMPT) for _ in range(streams)])
    for prompt in again.prompts:
        engine.ask(prompt, SHORT, salt="kept")
        engine.settle()
    return walls_rate(again.ask, streams * (LONG - SHORT))
