"""Architectures that the backend runs: their names in config.json, traits, and what a silent config means."""

from collections.abc import Mapping
from typing import Any, Literal

Architecture = (
    Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3n", "gemma4"]
    | Literal["phi3", "glm4", "granite", "granite4", "seed_oss", "smollm3", "olmo2", "olmo3"]
    | Literal["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "granite_moe", "granite4_moe"]
    | Literal["qwen3_next", "qwen3_5", "qwen3_5_moe", "deepseek_v2", "glm4_moe_lite"]
)

CLASSES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForCausalLM": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "Phi3ForCausalLM": "phi3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite_moe",
    "GraniteMoeSharedForCausalLM": "granite_moe",
    "GraniteMoeHybridForCausalLM": "granite4",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
"""Names in `architectures` of config.json."""
FAMILIES = (
    "Llama 3.x, Mistral, Ministral, Mixtral, Qwen2, Qwen2.5, Qwen3, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5, "
    "Gemma 2, Gemma 3, Gemma 3n, Gemma 4, Phi-3, Phi-4, gpt-oss, DeepSeek-V2, GLM-4-0414, GLM-4.7-Flash, "
    "Granite 3, Granite 4 without Mamba, OLMo 2, OLMo 3, Seed-OSS and SmolLM3"
)
BIASED = ("qwen2", "qwen2_moe", "gpt_oss", "seed_oss")
"""Architectures with biases on queries, keys and values."""
GEMMAS = ("gemma2", "gemma3", "gemma3n", "gemma4")
GRANITES = ("granite", "granite4", "granite_moe", "granite4_moe")
OLMOS = ("olmo2", "olmo3")
MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe"),
    *("granite_moe", "granite4_moe", "gemma4", "deepseek_v2", "glm4_moe_lite"),
)
"""Architectures with experts, some not in all models."""
GATED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")
"""Mixtures with a shared expert that each token weighs."""
LATENTS: tuple[Architecture, ...] = ("deepseek_v2", "glm4_moe_lite")
"""Architectures with multi-head latent attention."""
WITHOUT_WINDOWS = ("llama", "glm4", "seed_oss", "olmo2", *GRANITES, *LATENTS)
WIDTHS: dict[Architecture, str] = {
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", *LATENTS), "moe_intermediate_size"
    ),
    "granite4": "shared_intermediate_size",
}
"""Fields of the columns inside the MLP, or one expert, where that is not `intermediate_size`."""
HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_GEMMA: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_HYBRID: Mapping[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
DEFAULTS: dict[Architecture, Mapping[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"sliding_window": 4096, "num_key_value_heads": 32},
    "qwen3": {"sliding_window": 4096, "num_key_value_heads": 32, "head_dim": 128},
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "deepseek_v2": {
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
    "glm4_moe_lite": {
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
    "glm4": {"head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "granite4": {"shared_intermediate_size": 1024},
    "granite_moe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granite4_moe": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_local_base_freq": 5e5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "seed_oss": {"head_dim": 128, "attention_bias": True},
    "smollm3": {"rope_theta": 2e6, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "attention_bias": True,
    },
    "qwen3_next": {
        **_HYBRID,
        "num_key_value_heads": 2,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "qwen3_5": {**_HYBRID, "num_key_value_heads": 4},
    "qwen3_5_moe": {
        **_HYBRID,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "gemma2": {
        **_GEMMA,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    "gemma3": {
        **_GEMMA,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    "gemma3n": {
        **_GEMMA,
        "num_key_value_heads": 2,
        "vocab_size": 262_400,
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
    },
    "gemma4": {
        **_GEMMA,
        "vocab_size": 262_144,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
        },
    },
}
"""Defaults of transformers, by architecture: configs on the hub leave such fields out."""
