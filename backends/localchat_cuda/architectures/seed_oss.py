"""Seed-OSS: the Llama layer with biases on queries, keys and values, as Qwen2's.

ByteDance Seed, 2025 (github.com/ByteDance-Seed/seed-oss).
"""

from localchat_cuda.architectures.qwen2 import NAMES, forward

__all__ = ["NAMES", "forward"]
