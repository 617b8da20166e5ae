"""GLM-4.7-Flash: DeepSeek-V2 with experts weighted by sigmoids, and a correction that chooses them.

Z.ai, 2026 (huggingface.co/docs/transformers/model_doc/glm4_moe_lite). Its prediction head, a layer after
the last one, is not loaded.
"""

from dataclasses import replace

from localchat_cuda.architectures import deepseek_v2
from localchat_cuda.architectures.family import Family

FAMILY = Family(
    name="glm4_moe_lite",
    classes=("Glm4MoeLiteForCausalLM",),
    label="GLM-4.7-Flash",
    names=replace(
        deepseek_v2.FAMILY.names,
        experts=replace(deepseek_v2.EXPERTS, correction="mlp.gate.e_score_correction_bias"),
    ),
    defaults={
        "num_attention_heads": 20,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
    },
    intermediate_field="moe_intermediate_size",
)
forward = deepseek_v2.forward
