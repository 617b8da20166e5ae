"""The same model over a cache of plain numbers and one of 8 bits: tokens that a byte holds, decoding at 8,000
tokens of context, the first token."""

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


def kept(told: MetricsSnapshot) -> None:
    """kv8_capacity (tokens of the same memory, beside plain), and for kv16 and kv8 bs1_ctx8000, bs32_ctx8000,
    ttft_2048 and ttft_7000 (ms), each of kv8 also as a share of kv16's: NAME_of_kv16."""
    for name, kv_type in KEPT.items():
        _figures(name, kv_type, told)
        torch.cuda.empty_cache()
    told["kv8_capacity"] = told.pop("kv16_token_bytes") / told.pop("kv8_token_bytes")
    print(f"tokens of the same memory: {told['kv8_capacity']:.3f} times", flush=True)
    for what in (*(f"bs{size}_ctx8000" for size in STREAMS), "ttft_2048", "ttft_7000"):
        told[f"kv8_{what}_of_kv16"] = share = told[f"kv8_{what}"] / told[f"kv16_{what}"]
        print(f"kv8 {what}: {share:.3f} of plain", flush=True)


def _figures(name: str, kv_type: str | None, told: MetricsSnapshot) -> None:
    config = config_of("awq")
    tokens = (max(STREAMS) + 1) * CONTEXT
    runner = runner_of(
        config, slots=max(STREAMS), kv_tokens=tokens, context=CONTEXT, kv_type=kv_type
    )
    pages = runner.capabilities.kv_tokens // runner.capabilities.block_tokens + 1
    told[f"{name}_token_bytes"] = runner.memory().kv_bytes / pages
    engine = Engine(runner, config.vocabulary)
    for size in STREAMS:
        told[f"{name}_bs{size}_ctx8000"] = rate = _cached_rate(engine, size)
        print(f"{name}, {size} streams at 8,000 tokens: {rate:.0f} tok/s", flush=True)
    for size in (2048, 7000):
        told[f"{name}_ttft_{size}"] = first_token_ms(engine, size)
        print(f"{name}, first token of {size}: {told[f'{name}_ttft_{size}']:.1f} ms", flush=True)
    runner.close()


@dataclass
class _Again:
    """Prompts that were computed before: asked again, they cost a token each."""

    engine: Engine
    prompts: list[tuple[int, ...]]

    def ask(self, most: int) -> None:
        for prompt in self.prompts:
            self.engine.ask(prompt, most, salt="kept")
        self.engine.settle()


def _cached_rate(engine: Engine, streams: int) -> float:
    """tok/s of all streams at 8,000 tokens, their prompts computed once: between rounds of 257 and 1 tokens
    lies decoding alone."""
    draw = np.random.default_rng(streams)
    again = _Again(engine, [random_tokens(draw, PROMPT) for _ in range(streams)])
    for prompt in again.prompts:
        engine.ask(prompt, SHORT, salt="kept")
        engine.settle()
    return walls_rate(again.ask, streams * (LONG - SHORT))
