"""A hybrid of Qwen3.5-9B's shapes at one stream and several, over short and long contexts: random weights.

The floor of one stream is the time to read the weights but for the embedding, and to read and write the states.
"""

import torch

from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.reader import parse_config
from localchat_cuda.plan.weight_sizes import dummy_bytes
from scripts.bench.cuda.driving import Engine, runner_of
from scripts.bench.cuda.shapes import AWQ
from scripts.bench.cuda.speed import MetricsSnapshot, decode_rate, first_token_ms

QWEN35_9B = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 256,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}
_BYTES_S = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}
CONTEXT = 40_960


def step_bytes(config: ModelConfig) -> int:
    """Bytes that a step of one token reads and writes, but for keys and values."""
    embedding = 2 * config.vocabulary * config.hidden
    return dummy_bytes(config) - embedding + 2 * config.state_bytes


def hybrid(results: MetricsSnapshot, layers: int = 32, stored: str = "") -> None:
    """hybrid_bs*, hybrid_floor_bs1, hybrid_ctx32k_share, hybrid_ttft_ms_*; of W4 with the name `w4`."""
    raw = {**QWEN35_9B, "num_hidden_layers": layers, "torch_dtype": "bfloat16"}
    name = f"hybrid{stored and '_'}{stored}"
    config = parse_config(raw | ({"quantization_config": AWQ} if stored else {}), "Qwen3.5-9B")
    runner = runner_of(config, slots=8, kv_tokens=2 * CONTEXT, context=CONTEXT, step=2048)
    engine = Engine(runner, config.vocabulary)
    bandwidth = _BYTES_S.get(torch.cuda.get_device_name(), 0.0)
    floor = results[f"{name}_floor_bs1"] = bandwidth / step_bytes(config)
    for size in (1, 8):
        rate = results[f"{name}_bs{size}"] = decode_rate(engine, size)
        share = f", {rate / floor:.2f} of the floor" if size == 1 and floor else ""
        print(f"{name}, {size} streams: {rate:.0f} tok/s{share}", flush=True)
    near, far = (decode_rate(engine, 1, tokens, rounds=1) for tokens in (1024, 32_768))
    results[f"{name}_ctx32k_share"] = far / near
    print(f"{name}, at 1k: {near:.0f} tok/s, at 32k: {far:.0f}, {far / near:.3f}", flush=True)
    for size in (128, 2048):
        results[f"{name}_ttft_ms_{size}"] = first_token_ms(engine, size)
        print(
            f"{name}, first token of {size}: {results[f'{name}_ttft_ms_{size}']:.1f} ms", flush=True
        )
    runner.close()
    del engine, runner
    torch.cuda.empty_cache()
