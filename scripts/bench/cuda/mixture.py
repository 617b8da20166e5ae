"""Qwen3-30B-A3B at one stream and several, and its first token: random weights in W4.

The floor of one stream is the time to read what a token needs at 4.8 TB/s: attention, the router, the chosen
experts and the head.
"""

import torch

from localchat_cuda.memory_plan import dummy_bytes, token_bytes
from localchat_cuda.model_config import parse_config
from scripts.bench.cuda.driving import Engine, runner_of
from scripts.bench.cuda.shapes import AWQ
from scripts.bench.cuda.speed import MetricsSnapshot, decode_rate, first_token_ms

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
_BYTES_S = 4.8e12


def mixture(results: MetricsSnapshot, layers: int = 48) -> None:
    """experts_bs*, experts_floor_bs1, experts_ttft_ms_*."""
    raw = {**QWEN3_30B_A3B, "num_hidden_layers": layers, "torch_dtype": "bfloat16"}
    config = parse_config(raw | {"quantization_config": AWQ}, "Qwen3-30B-A3B")
    runner = runner_of(config, slots=32, kv_tokens=65536)
    engine = Engine(runner, config.vocabulary)
    embedding = 2 * config.vocabulary * config.hidden
    read = token_bytes(config, dummy_bytes(config)) - embedding
    results["experts_floor_bs1"] = _BYTES_S / read
    for size in (1, 2, 4, 8, 32):
        rate = results[f"experts_bs{size}"] = decode_rate(engine, size)
        share = f", {rate * read / _BYTES_S:.2f} of the floor" if size == 1 else ""
        print(f"experts, {size} streams: {rate:.0f} tok/s{share}", flush=True)
    for size in (128, 2048):
        results[f"experts_ttft_ms_{size}"] = first_token_ms(engine, size)
        print(
            f"experts, first token of {size}: {results[f'experts_ttft_ms_{size}']:.1f} ms",
            flush=True,
        )
    runner.close()
    del engine, runner
    torch.cuda.empty_cache()
