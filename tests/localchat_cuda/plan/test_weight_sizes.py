"""Weights counted by a config."""

from dataclasses import replace

import pytest

from localchat.model_files.safetensors import SafetensorsHeader, Tensor
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.reader import parse_config
from localchat_cuda.plan.weight_sizes import parameters, weights_bytes
from tests.support.cuda_configs import AWQ, QWEN25
from tests.support.cuda_machines import CONFIG
from tests.support.hub_configs import CONFIGS


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_models_of_the_hub_are_read_to_the_last_parameter(name: str) -> None:
    raw, count = CONFIGS[name]
    assert parameters(parse_config(raw, name)) == count


def test_floating_weights_count_in_the_type_that_they_are_loaded_in() -> None:
    stored = SafetensorsHeader(
        "m",
        {},
        (
            Tensor("a.weight", (100, 10), "F32", 8, 4000),
            Tensor("b.weight", (10,), "BF16", 8, 20),
            Tensor("positions", (5,), "I64", 8, 40),
        ),
        4068,
    )
    assert weights_bytes(CONFIG, [stored]) == 2 * 1000 + 2 * 10 + 40
    assert weights_bytes(replace(CONFIG, dtype="float32"), [stored]) == 4 * 1000 + 4 * 10 + 40
    awq = parse_config({**QWEN25, "quantization_config": AWQ}, "it")
    assert weights_bytes(awq, [stored]) == 2 * 1000 + 2 * 10 + 40


def test_packed_scales_and_tied_heads_are_counted_as_they_will_lie() -> None:
    awq: ModelConfig = replace(
        parse_config({**QWEN25, "quantization_config": AWQ}, "it"), tied=True
    )
    tensors = (
        Tensor("a.qweight", (1024, 128), "I32", 8, 524288),
        Tensor("a.qzeros", (8, 128), "I32", 8, 4096),
        Tensor("a.scales", (8, 1024), "F16", 8, 16384),
        Tensor("lm_head.weight", (10, 10), "F16", 8, 200),
    )
    held = SafetensorsHeader("m", {}, tensors, 0)
    assert weights_bytes(awq, [held]) == 524288 + 4 * 8 * 1024
    for group, sides in ((64, 2 * 16 + 4 * 2), (32, 2 * 32 + 4 * 4), (192, 2 * 16 + 4 * 2)):
        quantization = replace(awq.quantization, group=group)  # type: ignore[type-var]
        small = replace(awq, quantization=quantization)
        assert weights_bytes(small, [held]) == 524288 + sides * 1024
    assert weights_bytes(CONFIG, [held]) == 524288 + 4096 + 16384 + 200
