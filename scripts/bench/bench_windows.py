"""Room of a KV cache with and without pages of their own for windowed layers, as the planner reckons it.

Needs no GPU and reads no weights: `python -m scripts.bench.bench_windows`. The first figure of each pair is of
a cache in which all layers keep all tokens.
"""

import json
from dataclasses import replace
from typing import Any

from localchat.fit.hardware import Gpu
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.model_files.safetensors import SafetensorsHeader, Tensor
from localchat_cuda.config.model import PAGE_TOKENS, ModelConfig
from localchat_cuda.config.reader import parse_config
from localchat_cuda.plan import window_plan
from localchat_cuda.plan.memory_plan import kv_token_bytes, plan
from scripts.bench.cuda.shapes import GEMMA3_27B, GEMMA4_31B, GPT_OSS_20B

GB = 1_000_000_000
CONTEXTS = (8192, 32768, 131072)
CARDS = ((24, (None,)), (80, (None, *CONTEXTS)))
"""Gigabytes, and the contexts that are asked for; None: the longest that fits."""
MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "gemma 3 27b": (GEMMA3_27B, 17.0),
    "gemma 4 31b": (GEMMA4_31B, 19.0),
    "gpt-oss 20b": (GPT_OSS_20B, 13.8),
}
"""Shape, and gigabytes of its weights in four bits."""


def planned(config: ModelConfig, weights: float, card: int, context: int | None) -> MemoryPlan:
    size = int(weights * GB)
    header = SafetensorsHeader("m", {}, (Tensor("w", (size // 2,), "BF16", 8, size),), size)
    gpu = Gpu(0, "a card", card * GB, (card - 1) * GB)
    return plan(config, [header], LoadOptions(context_tokens=context), gpu)


def main() -> None:
    results = []
    for name, (raw, weights) in MODELS.items():
        config = parse_config(raw, name)
        whole = replace(config, windows=())
        every, others = kv_token_bytes(config), kv_token_bytes(config, windowed=False)
        window = window_plan.sequence_pages(config) * PAGE_TOKENS * (every - others)
        print(f"{name}: {every / 1e3:.1f} kB a token; {others / 1e3:.1f} and {window / 1e6:.0f} MB")
        for context in CONTEXTS:
            apart = others + window / context
            print(f"  {context:7,} tokens: {every / 1e3:6.1f} -> {apart / 1e3:6.1f} kB a token")
            results.append({"model": name, "tokens": context, "before": every, "after": apart})
        for card, contexts in CARDS:
            for asked in contexts:
                one, other = (planned(each, weights, card, asked) for each in (whole, config))
                step = other.max_step_tokens
                rows = window_plan.rows(config, other.window_pages, step, LoadOptions().max_slots)
                print(
                    f"  {card} GB, asked {asked}: {_told(one)} -> {_told(other)}, {rows} at once, "
                    f"steps of {step}"
                )
    print(json.dumps(results))


def _told(found: MemoryPlan) -> str:
    if not found.fits:
        return f"does not fit (longest {found.max_context_tokens:,})"
    kind = "apart" if found.window_pages else "together"
    return f"{found.kv_tokens:,} tokens, longest {found.context_tokens:,} ({kind})"


if __name__ == "__main__":
    main()
