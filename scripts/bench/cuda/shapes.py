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
STORED: dict[str, dict[str, object]] = {
    "": {},
    "awq": {"quantization_config": AWQ},
    "awq_64": {"quantization_config": {**AWQ, "group_size": 64}},
    "awq_32": {"quantization_config": {**AWQ, "group_size": 32}},
    "q4_k_m": {"quantization_config": {"quant_method": "gguf", "mix": "Q4_K_M", "head": "Q6_K"}},
    "gptq": {"quantization_config": GPTQ},
    "fp8": {"quantization_config": FP8, "torch_dtype": "bfloat16"},
    "fp8_blocks": {"quantization_config": BLOCKS, "torch_dtype": "bfloat16"},
    "gptq_order": {"quantization_config": {**GPTQ, "desc_act": True}},
}
"""What config.json adds for each way to store the layers; empty: as trained, in bf16."""
