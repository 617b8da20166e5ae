"""Weights without memory: as many, as wide and of the types of those that a load brings to the device."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localchat.model_files.open_gguf import read_header
from localchat_cuda.config.gguf import layer_formats
from localchat_cuda.config.model import ModelConfig, rounded_config
from localchat_cuda.config.reader import read_config
from localchat_cuda.gguf_files import open_gguf
from localchat_cuda.weights.gguf_source import GgufWeights
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.meta_weights import META, MetaWeights
from localchat_cuda.weights.source import CheckpointWeights, WeightSource
from tests.support import float_checkpoints, gguf_files, quantizers, tiny_models
from tests.support.ggml_blocks import random_rows
from tests.support.quantizers import WIDE, Way
from tests.support.tiny_models import CPU

STORED: dict[str, Any] = {
    "awq": (Way(), "awq"),
    "awq-32": (Way(size=32), "awq"),
    "gptq": (Way(symmetric=True), 1),
    "gptq-rows": (Way(size=0), 1),
    "gptq-order": (Way(ordered=True), 1),
    "gptq-8-bits": (Way(bits=8, symmetric=True), 1),
    "gptq-8-bits-order": (Way(bits=8, symmetric=True, ordered=True), 1),
    "packed": (Way(), 0),
    "packed-order": (Way(ordered=True), 0),
    "packed-8-bits": (Way(bits=8, symmetric=True), 0),
    "int8": (Way(size=0, symmetric=True, bits=8), "int8"),
    "int8-zeros": (Way(size=0, bits=8), "int8"),
}


def described(value: object) -> object:
    """Return types, shapes and strides in place of tensors, anywhere in a value."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    if is_dataclass(value):
        return {field.name: described(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: described(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [type(value).__name__, *map(described, value)]
    return value


def drawn(tensor: gguf_files.Tensor, draw: np.random.Generator) -> bytes:
    """Return the bytes of a tensor with any numbers."""
    shape = tensor.shape[::-1]
    if tensor.code == gguf_files.Q4_0:
        rows, columns = shape
        return random_rows("Q4_0", rows, columns, draw).tobytes()
    return np.ones(shape, np.float32).tobytes()


def compare(
    config: ModelConfig,
    source: WeightSource,
    meta: MetaWeights | None = None,
    *,
    head_bounds: bool = False,
) -> None:
    """Load a model with and without memory, and compare."""

    def loaded(weights: WeightSource, device: torch.device) -> object:
        return described(load(config, weights, device, head_bounds=head_bounds))

    assert loaded(meta or MetaWeights(), META) == loaded(source, CPU)


@pytest.mark.parametrize("kind", sorted(STORED))
def test_quantized_layers_have_the_layout_of_a_load(kind: str, tmp_path: Path) -> None:
    quantizers.save(tiny_models.reference("qwen3", **WIDE), tmp_path, *STORED[kind])
    compare(read_config(tmp_path), CheckpointWeights(tmp_path, CPU))


@pytest.mark.parametrize("layout", ["nvfp4", "mxfp8"])
def test_floating_codes_have_the_layout_of_a_load(layout: str, tmp_path: Path) -> None:
    float_checkpoints.save_floats(tiny_models.reference("qwen3", **WIDE), tmp_path, layout)
    compare(read_config(tmp_path), CheckpointWeights(tmp_path, CPU))


@pytest.mark.parametrize("rounded_to", ["int4", "int8", "fp8"])
def test_layers_rounded_at_the_load_have_its_layout(rounded_to: Any, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("qwen3", **WIDE), tmp_path)
    config = rounded_config(read_config(tmp_path), rounded_to, "it")
    compare(config, CheckpointWeights(tmp_path, CPU))


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen2", "gemma3", "olmo2", "mixtral", "qwen2-moe", "qwen3.5", "deepseek-v2"),
        *("lfm2", "granite4-h", "nemotron-h-moe"),
    ],
)
def test_floating_families_have_the_layout_of_a_load(family: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference(family), tmp_path)
    compare(read_config(tmp_path), CheckpointWeights(tmp_path, CPU))


def test_experts_of_gpt_oss_have_the_layout_of_a_load(tmp_path: Path) -> None:
    tiny_models.save_mxfp4(tiny_models.reference("gpt-oss"), tmp_path)
    compare(read_config(tmp_path), CheckpointWeights(tmp_path, CPU))


def test_a_head_with_an_8_bit_copy_has_the_layout_of_a_load(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("llama"), tmp_path)
    source = CheckpointWeights(tmp_path, CPU)
    compare(read_config(tmp_path), source, head_bounds=True)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma3"])
def test_layers_of_a_gguf_file_have_the_layout_of_a_load(architecture: str, tmp_path: Path) -> None:
    size = gguf_files.Size(
        width=256,
        heads=4,
        kv_heads=2,
        head_width=64,
        feed_forward=512,
        window=16,
        code=gguf_files.Q4_0,
        extra={"tokenizer.ggml.pre": "gpt-2"},
    )
    path = gguf_files.ARCHITECTURES[architecture](size).write(tmp_path / "it.gguf", 7, drawn)
    config = open_gguf(path).config
    header = read_header(path)
    meta = MetaWeights(layer_formats(header), config.head_format)
    compare(config, GgufWeights(header, CPU), meta)
