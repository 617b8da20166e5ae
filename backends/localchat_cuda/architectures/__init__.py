"""Supported model families, by their name in ModelConfig."""

from types import ModuleType

from localchat_cuda.architectures import (
    deepseek_v2,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4_moe_lite,
    gpt_oss,
    granite,
    granite4,
    granite_moe,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    prediction_head,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from localchat_cuda.supported_architectures import Architecture

ARCHITECTURES: dict[Architecture, ModuleType] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "phi3": phi3,
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "glm4": glm4,
    "granite": granite,
    "granite4": granite4,
    "granite_moe": granite_moe,
    "granite4_moe": granite_moe,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "deepseek_v2": deepseek_v2,
    "glm4_moe_lite": glm4_moe_lite,
}

__all__ = ["ARCHITECTURES", "prediction_head"]
