"""Architectures that run here, by their name in ModelConfig."""

from types import ModuleType

from localchat_cuda.architectures import llama, qwen2, qwen3
from localchat_cuda.config import Architecture

ARCHITECTURES: dict[Architecture, ModuleType] = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}

__all__ = ["ARCHITECTURES"]
