"""Shapes from config.json of well-known models on the hub, with their numbers of parameters."""

from typing import Any

_BF16 = {"torch_dtype": "bfloat16"}
_MISTRAL: dict[str, Any] = {
    **_BF16,
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_GEMMA3: dict[str, Any] = {
    **_BF16,
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": [1, 106],
}
_SEEING: dict[str, Any] = {
    **_BF16,
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "vision_config": {"hidden_size": 1152},
}
_GEMMA3_TEXT: dict[str, Any] = {
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
_PHI: dict[str, Any] = {
    **_BF16,
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 10,
    "vocab_size": 100352,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 250000,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "mistral:7b": (_MISTRAL, 7_248_023_552),
    "mistral-7b-v0.1": (
        {**_MISTRAL, "vocab_size": 32000, "rope_theta": 1e4, "sliding_window": 4096},
        7_241_732_096,
    ),
    "mistral-nemo:12b": (
        {
            **_MISTRAL,
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "head_dim": 128,
            "vocab_size": 131072,
        },
        12_247_782_400,
    ),
    "mistral-small:24b": (
        {
            **_BF16,
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": {
                **{key: held for key, held in _MISTRAL.items() if key != "architectures"},
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "num_hidden_layers": 40,
                "head_dim": 128,
                "vocab_size": 131072,
                "max_position_embeddings": 131072,
                "rope_theta": 1e9,
            },
        },
        23_572_403_200,
    ),
    "gemma3:1b": (_GEMMA3, 999_885_952),
    "gemma3:270m": (
        {**_GEMMA3, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18},
        268_098_176,
    ),
    "gemma3:4b": (
        {
            **_SEEING,
            "text_config": {
                **_GEMMA3_TEXT,
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
            },
        },
        3_880_263_168,
    ),
    "gemma3:27b": (
        {
            **_SEEING,
            "text_config": {
                **_GEMMA3_TEXT,
                "head_dim": 128,
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "num_hidden_layers": 62,
                "query_pre_attn_scalar": 168,
            },
        },
        27_009_346_304,
    ),
    "gemma-2-9b": (
        {
            **_BF16,
            "architectures": ["Gemma2ForCausalLM"],
            "head_dim": 256,
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
            "hidden_act": "gelu_pytorch_tanh",
        },
        9_241_705_984,
    ),
    "phi4:14b": (_PHI, 14_659_507_200),
    "phi4-mini:3.8b": (
        {
            **_PHI,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "vocab_size": 200064,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 48,
                "long_factor": [2.0] * 48,
            },
            "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
        3_836_021_760,
    ),
}
