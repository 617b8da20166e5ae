"""Supported model families, by their name in ModelConfig."""

from types import ModuleType

from localchat_cuda.architectures import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3
from localchat_cuda.model_config import Architecture

ARCHITECTURES: dict[Architecture, ModuleType] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "phi3": phi3,
}

__all__ = ["ARCHITECTURES"]
