"""Compares storage formats of the layers of one model with AWQ."""

import torch

from localchat.fit.load_options import RoundedType
from localchat_cuda.config.model import ModelConfig, rounded_config
from scripts.bench.cuda.driving import Engine, config_of, runner_of
from scripts.bench.cuda.speed import MetricsSnapshot, decode_rate, first_token_ms, half_precision

FOUR_BITS = ("awq", "awq_64", "awq_32", "gptq", "gptq_order")
EIGHT_BITS = ("fp8", "fp8_blocks")
GROUPED_FLOATS = ("nvfp4", "mxfp8")
ON_LOAD: dict[RoundedType, str] = {"fp8": "fp8", "int8": "int8", "int4": "awq"}
"""What --quantize makes, and what a checkpoint that is stored so has."""
STREAMS = (1, 8, 32)


def four_bits(results: MetricsSnapshot) -> None:
    """gptq_bs*, gptq_ttft_ms_2048, the same for gptq_order (act-order) and for AWQ in groups of 64 and 32, each
    also as a share of the rate of AWQ in groups of 128.
    """
    for stored in FOUR_BITS:
        figures(stored, results)
        torch.cuda.empty_cache()
    for stored in FOUR_BITS[1:]:
        for name in (*(f"bs{size}" for size in STREAMS), "ttft_ms_2048"):
            results[f"{stored}_{name}_of_awq"] = share = (
                results[f"{stored}_{name}"] / results[f"awq_{name}"]
            )
            print(f"{stored} {name}: {share:.3f} of AWQ", flush=True)


def eight_bits(results: MetricsSnapshot) -> None:
    """fp8_bs*, fp8_ttft_ms_2048, the same for fp8_blocks; one stream also as a multiple of bf16."""
    if "bf16_bs1" not in results:
        half_precision(results)
        torch.cuda.empty_cache()
    for stored in EIGHT_BITS:
        figures(stored, results)
        results[f"{stored}_bs1_of_bf16"] = share = results[f"{stored}_bs1"] / results["bf16_bs1"]
        print(f"{stored}, 1 stream: {share:.2f} of bf16", flush=True)
        torch.cuda.empty_cache()


def grouped_floats(results: MetricsSnapshot) -> None:
    """nvfp4_bs*, mxfp8_bs* and their first tokens, beside those of AWQ and FP8."""
    for stored, other in zip(GROUPED_FLOATS, ("awq", "fp8"), strict=True):
        for name in (stored, other):
            if f"{name}_bs1" not in results:
                figures(name, results)
                torch.cuda.empty_cache()
        for figure in (*(f"bs{size}" for size in STREAMS), "ttft_ms_2048"):
            share = results[f"{stored}_{figure}"] / results[f"{other}_{figure}"]
            print(f"{stored} {figure}: {share:.3f} of {other}", flush=True)


def rounded(results: MetricsSnapshot) -> None:
    """int8_bs* and the like, on_load_int8_bs* of a checkpoint that is rounded while it loads, and as shares of
    what is stored so."""
    for to, stored in ON_LOAD.items():
        if f"{stored}_bs1" not in results:
            figures(stored, results)
            torch.cuda.empty_cache()
        name = f"on_load_{to}"
        figures(name, results, rounded_config(config_of(), to, "Qwen2.5-7B"))
        torch.cuda.empty_cache()
        for figure in (*(f"bs{size}" for size in STREAMS), "ttft_ms_2048"):
            share = results[f"{name}_{figure}"] / results[f"{stored}_{figure}"]
            print(f"{name} {figure}: {share:.3f} of {stored}", flush=True)


def figures(stored: str, results: MetricsSnapshot, config: ModelConfig | None = None) -> None:
    """Decode rates and the first token of 2,048, for one storage format of the layers, or a config."""
    config = config or config_of(stored)
    runner = runner_of(config, slots=max(STREAMS), kv_tokens=max(STREAMS) * 512 + 8192)
    engine = Engine(runner, config.vocabulary)
    for size in STREAMS:
        results[f"{stored}_bs{size}"] = decode_rate(engine, size)
        print(f"{stored}, {size} streams: {results[f'{stored}_bs{size}']:.0f} tok/s", flush=True)
    results[f"{stored}_ttft_ms_2048"] = first_token_ms(engine, 2048)
    print(f"{stored}, first token of 2,048: {results[f'{stored}_ttft_ms_2048']:.1f} ms", flush=True)
    runner.close()
