"""gpt-oss: layers of experts, with biases, sinks in attention, and a window in every second layer.

OpenAI, 2025 (arXiv 2508.10925). Experts are stored in MXFP4, and their gates are clamped.
"""

from dataclasses import replace

from localchat_cuda.architectures import llama
from localchat_cuda.architectures.family import ExpertTraits, Family
from localchat_cuda.architectures.names import ExpertNames

FAMILY = Family(
    name="gpt_oss",
    classes=("GptOssForCausalLM",),
    label="gpt-oss",
    names=replace(
        llama.FAMILY.names,
        biased=frozenset({"qkv", "o"}),
        sinks="self_attn.sinks",
        experts=ExpertNames(
            router="mlp.router",
            gate_up=("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
            down="mlp.experts.down_proj",
            interleaved="mlp.experts.",
        ),
    ),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "attention_bias": True,
    },
    qkv_bias="required",
    windows="pattern",
    experts=ExpertTraits(clamped=True, fixed_formats="its experts support bf16 and MXFP4"),
)
forward = llama.forward
