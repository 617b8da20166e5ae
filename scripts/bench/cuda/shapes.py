"""Qwen2.5-7B-Instruct as its config.json has it."""

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "eos_token_id": 151645,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
MXFP8 = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {
                "num_bits": 8,
                "type": "int",
                "strategy": "group",
                "group_size": 128,
                "symmetric": True,
            }
        }
    },
}
STORED: dict[str, dict[str, object]] = {
    "": {},
    "awq": {"quantization_config": AWQ},
    "awq_64": {"quantization_config": {**AWQ, "group_size": 64}},
    "awq_32": {"quantization_config": {**AWQ, "group_size": 32}},
    "q4_k_m": {"quantization_config": {"quant_method": "gguf", "mix": "Q4_K_M", "head": "Q6_K"}},
    "gptq": {"quantization_config": GPTQ},
    "q8_0": {"quantization_config": {"quant_method": "gguf", "mix": "Q8_0", "head": "Q8_0"}},
    "q6_k": {"quantization_config": {"quant_method": "gguf", "mix": "Q6_K", "head": "Q6_K"}},
    "int8": {"quantization_config": INT8},
    "fp8": {"quantization_config": FP8, "torch_dtype": "bfloat16"},
    "fp8_blocks": {"quantization_config": BLOCKS, "torch_dtype": "bfloat16"},
    "nvfp4": {"quantization_config": NVFP4, "torch_dtype": "bfloat16"},
    "mxfp8": {"quantization_config": MXFP8, "torch_dtype": "bfloat16"},
    "gptq_order": {"quantization_config": {**GPTQ, "desc_act": True}},
}
"""What config.json adds for each way to store the layers; empty: as trained, in bf16."""
GEMMA3_27B = {
    "architectures": ["Gemma3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA4_31B = {
    "architectures": ["Gemma4ForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "experts_per_token": 4,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 150000,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "hidden_act": "silu",
    "eos_token_id": 200002,
}
