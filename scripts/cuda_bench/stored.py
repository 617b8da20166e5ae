"""The same model with its layers stored in several ways: what each costs, beside AWQ."""

import torch

from scripts.cuda_bench.driving import Engine, config_of, runner_of
from scripts.cuda_bench.speed import Figures, decode_rate, first_token_ms

FOUR_BITS = ("awq", "gptq", "gptq_order")
STREAMS = (1, 8, 32)


def four_bits(told: Figures) -> None:
    """gptq_bs*, gptq_ttft_ms_2048, the same of gptq_order (act-order), each also as a share of AWQ's rate."""
    for stored in FOUR_BITS:
        figures(stored, told)
        torch.cuda.empty_cache()
    for stored in FOUR_BITS[1:]:
        for name in (*(f"bs{size}" for size in STREAMS), "ttft_ms_2048"):
            told[f"{stored}_{name}_of_awq"] = share = told[f"{stored}_{name}"] / told[f"awq_{name}"]
            print(f"{stored} {name}: {share:.3f} of AWQ", flush=True)


def figures(stored: str, told: Figures) -> None:
    """Decode rates and the first token of 2,048, of one way to store the layers."""
    config = config_of(stored)
    runner = runner_of(config, slots=max(STREAMS), kv_tokens=max(STREAMS) * 512 + 8192)
    engine = Engine(runner, config.vocabulary)
    for size in STREAMS:
        told[f"{stored}_bs{size}"] = decode_rate(engine, size)
        print(f"{stored}, {size} streams: {told[f'{stored}_bs{size}']:.0f} tok/s", flush=True)
    told[f"{stored}_ttft_ms_2048"] = first_token_ms(engine, 2048)
    print(f"{stored}, first token of 2,048: {told[f'{stored}_ttft_ms_2048']:.1f} ms", flush=True)
    runner.close()
