"""Drafts of a model's own head, and of a draft model, by replay of texts of which a given share is guessed.

Random weights: the model's sampler gives a recorded text, that of what drafts the same text with wrong tokens
in random places. All work is done; accepted lengths are those of guesses that are right independently.
"""

import statistics
from typing import Any

import numpy as np
import torch

from localchat.backend_api.interface import LoadRequest
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.reader import parse_config
from localchat_cuda.load import random_weights
from localchat_cuda.load_drafts import attach_head
from localchat_cuda.runner.drafter import CudaDrafter
from localchat_cuda.runner.runner import CudaRunner
from scripts.bench.cuda.driving import GPU, Engine, ReplaySampler, random_tokens, runner_of
from scripts.bench.cuda.hybrid import QWEN35_9B
from scripts.bench.cuda.shapes import AWQ, QWEN
from scripts.bench.cuda.speed import MetricsSnapshot

PROMPT, WRITTEN, ROUNDS = 256, 400, 6
SHARES = (0.8, 0.5, 0.2)
CONTEXT = 4096
_SMALL = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
"""Qwen2.5-0.5B, where it differs from 7B."""


def heads(results: MetricsSnapshot) -> None:
    """heads_*, heads_w4_* and draft_model_*: gain by share of right guesses, and what a guess takes."""
    own_head(results, "heads", {})
    own_head(results, "heads_w4", {"quantization_config": AWQ})
    draft_model(results)


def own_head(results: MetricsSnapshot, name: str, stored: dict[str, Any]) -> None:
    """Qwen3.5-9B with its head, its layers in bf16 or `stored` otherwise."""
    config = parse_config({**QWEN35_9B, "torch_dtype": "bfloat16", **stored}, "Qwen3.5-9B")
    runner = _runner(config)
    attach_head(runner, config, random_weights(config, GPU), _request(runner))
    _gains(results, name, runner, config.vocabulary)


def draft_model(results: MetricsSnapshot) -> None:
    """draft_model_*: 0.5B for 7B in AWQ."""
    config = parse_config(
        {**QWEN, "torch_dtype": "float16", "quantization_config": AWQ}, "Qwen2.5-7B"
    )
    small = parse_config({**QWEN, **_SMALL, "torch_dtype": "bfloat16"}, "Qwen2.5-0.5B")
    runner = _runner(config)
    own = runner_of(small, slots=8, kv_tokens=2 * CONTEXT, context=CONTEXT, step=1024)
    runner.attach(CudaDrafter(own, runner.table, "the draft model", small.vocabulary))
    _gains(results, "draft_model", runner, config.vocabulary)


def _runner(config: ModelConfig) -> CudaRunner:
    return runner_of(config, slots=8, kv_tokens=4 * CONTEXT, context=CONTEXT, step=2048)


def _request(runner: CudaRunner) -> LoadRequest:
    can = runner.capabilities
    plan = MemoryPlan(
        "cuda", 0, 0, 0, 0, 0, True, can.context_tokens, can.context_tokens, "bf16", True, 0, 0, 1024
    )  # fmt: skip
    return LoadRequest(plan, LoadOptions(max_slots=can.max_slots))


def _gains(results: MetricsSnapshot, name: str, runner: CudaRunner, vocabulary: int) -> None:
    drafter = runner.drafter
    results[f"{name}_guess_us"] = drafter.token_s * 1e6
    print(f"{name}: a guess takes {drafter.token_s * 1e6:.0f} us", flush=True)
    draw = np.random.default_rng(5)
    text = np.array(random_tokens(draw, PROMPT + WRITTEN + 64), np.int32)
    for share in SHARES:
        right = draw.random(text.size) < share
        _replay(runner, text)
        _replay(drafter.runner, np.where(right, text, text + 1).astype(np.int32))
        for each in (runner, drafter.runner):  # as a program that has been idle for a while
            while each.warm_up_next():
                pass
        if (states := runner.model.pages.states) is not None:  # those that another engine saved
            for key in list(states._saved):
                states.discard(key)
        engine = Engine(runner, vocabulary, speculation=True)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for drafts in (False, True):
                asked = engine.ask(text[:PROMPT].tolist(), WRITTEN, speculation=drafts)
                engine.settle()
                seconds[drafts].append(asked.times_s[-1] - asked.times_s[0])
                while runner._missing or runner._repeated:  # what was not prepared is, in a pause
                    runner.warm_up_next()
        model = engine.loop._draft_model
        assert model is not None
        plain, drafted = (statistics.median(seconds[each][-3:]) for each in (False, True))
        results[f"{name}_gain_{share:.0%}"] = gain = plain / drafted
        accepted = model.accepted / max(model.drafted, 1)
        print(f"{name}, {share:.0%} right: {gain:.2f} times, {WRITTEN / plain:.0f} to "
              f"{WRITTEN / drafted:.0f} tok/s; {model.accepted} of {model.drafted} accepted "
              f"({accepted:.2f}); {model.off or 'on'}; rounds "
              f"{', '.join(f'{a / b:.2f}' for a, b in zip(*seconds.values(), strict=True))}; a guess "
              f"{model.token_s * 1e6:.0f} us, steps of 1 to 16 rows "
              f"{[round(model.cost.seconds(rows) * 1e3, 2) for rows in (1, 2, 4, 8, 16)]} ms, wait "
              f"{model.cost.wait_s * 1e6:.0f} us", flush=True)  # fmt: skip
    runner.close()
    torch.cuda.empty_cache()


def _replay(runner: CudaRunner, text: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    """Let a runner's sampler give this text."""
    sampler: Any = runner._sampler
    if not isinstance(sampler, ReplaySampler):
        sampler.__class__ = ReplaySampler
        sampler.recorded = torch.zeros(CONTEXT, dtype=torch.int32, device=GPU)
        runner.graphs.clear()
    sampler.recorded[: text.size].copy_(torch.from_numpy(text))
    torch.cuda.synchronize()
