"""Supported model families: one module each, with FAMILY, its data, and `forward`. Imports no torch."""

from importlib import import_module
from types import ModuleType

from localchat_cuda.architectures.family import Family

# In the order in which messages list the models.
ARCHITECTURES: dict[str, ModuleType] = {
    name: import_module(f"localchat_cuda.architectures.{name}")
    for name in (
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "gemma2",
        "gemma3",
        "gemma4",
        "phi3",
        "gpt_oss",
        "deepseek_v2",
        "glm4",
        "glm4_moe_lite",
        "granite",
        "granite_moe",
        "granite4",
        "granite4_moe",
        "lfm2",
        "lfm2_moe",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "seed_oss",
        "smollm3",
    )
}
"""Modules by the name of their family."""


def families() -> list[Family]:
    """Return the data of all families."""
    return [module.FAMILY for module in ARCHITECTURES.values()]


def labels() -> str:
    """Return the supported models as a list in prose."""
    *others, last = (family.label for family in families() if family.label)
    return f"{', '.join(others)} and {last}"


__all__ = ["ARCHITECTURES", "families", "labels"]
