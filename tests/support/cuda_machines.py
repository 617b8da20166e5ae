"""Shared by tests: CONFIG, GB, gpu, header."""

from localchat.fit.hardware import Gpu
from localchat.model_files.safetensors import SafetensorsHeader, Tensor
from localchat_cuda.config.reader import parse_config
from tests.support.cuda_configs import QWEN25

CONFIG = parse_config(QWEN25, "it")


GB = 1_000_000_000


def header(size: int, name: str = "w") -> SafetensorsHeader:
    return SafetensorsHeader("m", {}, (Tensor(name, (size // 2,), "BF16", 8, size),), size)


def gpu(free: int, total: int = 24 * GB) -> Gpu:
    return Gpu(0, "a card", total, free)
