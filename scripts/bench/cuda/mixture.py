"""Qwen3-30B-A3B in W4 and gpt-oss-20b in MXFP4 at one stream and several, and their first token.

Random weights. The floor of one stream is the time to read what a token needs: attention, the router, the
chosen experts and the head.
"""

import torch

from localchat_cuda.config.reader import parse_config
from localchat_cuda.plan.weight_sizes import dummy_bytes, token_bytes
from scripts.bench.cuda.driving import Engine, runner_of
from scripts.bench.cuda.shapes import AWQ
from scripts.bench.cuda.speed import MetricsSnapshot, decode_rate, first_token_ms
from scripts.bench.kernels.timing import memory_rate

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
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
"""Its positions are scaled by YaRN, too, which costs nothing."""


def mixture(results: MetricsSnapshot) -> None:
    """experts_* and gpt_oss_*: bs*, floor_bs1, ttft_ms_*."""
    qwen = {**QWEN3_30B_A3B, "quantization_config": AWQ}
    for name, raw in (("experts", qwen), ("gpt_oss", GPT_OSS_20B)):
        _measure(results, name, raw)


def _measure(results: MetricsSnapshot, name: str, raw: dict[str, object]) -> None:
    config = parse_config({**raw, "torch_dtype": "bfloat16"}, name)
    runner = runner_of(config, slots=32, kv_tokens=65536)
    engine = Engine(runner, config.vocabulary)
    embedding = 2 * config.vocabulary * config.hidden
    read = token_bytes(config, dummy_bytes(config)) - embedding
    floor = results[f"{name}_floor_bs1"] = memory_rate() / read
    for size in (1, 2, 4, 8, 32):
        rate = results[f"{name}_bs{size}"] = decode_rate(engine, size)
        share = f", {rate / floor:.2f} of the floor" if size == 1 else ""
        print(f"{name}, {size} streams: {rate:.0f} tok/s{share}", flush=True)
    for size in (128, 2048):
        found = results[f"{name}_ttft_ms_{size}"] = first_token_ms(engine, size)
        print(f"{name}, first token of {size}: {found:.1f} ms", flush=True)
    runner.close()
    del engine, runner
    torch.cuda.empty_cache()
