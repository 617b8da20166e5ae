"""DeepSeek-V2: attention over latents, first layers without experts, and shared experts in the others.

DeepSeek-AI, 2024 (arXiv 2405.04434). The Lite model has no latent of queries. One gemm computes the queries, or
their latent, and the latent of keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from localchat_cuda.architectures import llama, qwen3_moe
from localchat_cuda.architectures.family import Family

if TYPE_CHECKING:
    from localchat_cuda.layers.dense import Layers, Sums, X
    from localchat_cuda.weights.model_weights import LayerWeights

EXPERTS = replace(
    qwen3_moe.EXPERTS,
    shared=(
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "mlp.shared_experts.down_proj",
    ),
)
FAMILY = Family(
    name="deepseek_v2",
    classes=("DeepseekV2ForCausalLM",),
    label="DeepSeek-V2",
    names=replace(
        llama.FAMILY.names,
        norms={
            **llama.FAMILY.names.norms,
            "q_latent": "self_attn.q_a_layernorm.weight",
            "kv_latent": "self_attn.kv_a_layernorm.weight",
        },
        merged={
            "q_kv": ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
            "latents": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
            "q": ("self_attn.q_b_proj",),
            "o": ("self_attn.o_proj",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        },
        experts=EXPERTS,
        kv="self_attn.kv_b_proj",
    ),
    defaults={
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
    },
    intermediate_field="moe_intermediate_size",
)


def mix(ops: Layers[X], x: X, layer: LayerWeights, number: int) -> Sums:
    """Attend over the latents of a layer: partial sums [S, T, hidden]."""
    linears = layer.linears
    norms = layer.norms
    assert layer.kv is not None
    if "latents" in linears:
        latents = ops.gemm(x, linears["latents"])
        q = ops.gemm(ops.norm_latent(latents, norms["q_latent"]), linears["q"])
    else:
        q = latents = ops.gemm(x, linears["q_kv"])
    x = ops.attend_latent(q, latents, norms["kv_latent"], layer.kv, number)
    return ops.reduce(ops.gemm(x, linears["o"]))


forward = partial(llama.forward, mix=mix)
"""Return the last states [P, hidden] of one step. Write latents to the KV pages."""
