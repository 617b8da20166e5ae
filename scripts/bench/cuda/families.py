"""Architectures other than Qwen at one stream and eight, and a prompt longer than a window: random
weights.
"""

from typing import Any

import torch

from localchat_cuda.config.reader import parse_config
from scripts.bench.cuda.driving import Engine, runner_of
from scripts.bench.cuda.shapes import AWQ
from scripts.bench.cuda.speed import MetricsSnapshot, decode_rate, first_token_ms

MODELS: dict[str, dict[str, Any]] = {
    "mistral_7b": {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
    "gemma3_12b": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "phi4_14b": {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "vocab_size": 100352,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 250000.0,
    },
}
"""As their config.json has them; what Gemma's leaves out is left out here."""


def families(results: MetricsSnapshot) -> None:
    """NAME_awq_bs1, NAME_awq_bs8, NAME_awq_ttft_ms_6144, and the same in bf16 for Gemma."""
    for name in MODELS:
        figures(name, "awq", results)
    figures("gemma3_12b", "bf16", results)


def figures(name: str, stored: str, results: MetricsSnapshot) -> None:
    """Results of one model with its layers stored in one format."""
    quantized = {"quantization_config": AWQ} if stored == "awq" else {}
    config = parse_config({**MODELS[name], "torch_dtype": "bfloat16", **quantized}, name)
    runner = runner_of(config, slots=8, kv_tokens=16384)
    engine = Engine(runner, config.vocabulary)
    key = f"{name}_{stored}"
    for size in (1, 8):
        results[f"{key}_bs{size}"] = decode_rate(engine, size)
        print(f"{key}, {size} streams: {results[f'{key}_bs{size}']:.0f} tok/s", flush=True)
    results[f"{key}_ttft_ms_6144"] = first_token_ms(engine, 6144)
    print(f"{key}, first token of 6,144: {results[f'{key}_ttft_ms_6144']:.1f} ms", flush=True)
    runner.close()
    del engine, runner
    torch.cuda.empty_cache()
