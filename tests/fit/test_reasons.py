"""The sentence on backend and placement, and the one on a plan that was wrong."""

from dataclasses import replace

import pytest

from localchat.core.engine_info import prediction_error
from localchat.fit.report import chosen_because, placed
from tests.support.memory_plans import PLAN


@pytest.mark.parametrize(
    ("gpu_layers", "gpu_bytes", "told"),
    [
        (0, 0, "A GGUF file runs on llama.cpp, on the CPU."),
        (20, 9, "A GGUF file runs on llama.cpp, 20 of 33 layers on the GPU, the rest in RAM."),
        (33, 9, "A GGUF file runs on llama.cpp, all layers on the GPU."),
        (33, 0, "A GGUF file runs on llama.cpp, all layers on the GPU, which shares the RAM."),
    ],
)
def test_the_sentence_says_backend_and_place(gpu_layers: int, gpu_bytes: int, told: str) -> None:
    plan = replace(PLAN, layers=33, gpu_layers=gpu_layers, gpu_bytes=gpu_bytes)
    assert placed(chosen_because("llamacpp", "gguf", is_requested=False), plan) == told


def test_who_was_asked_for_and_who_was_passed_over_is_said() -> None:
    assert placed(chosen_because("cuda", "safetensors", is_requested=True), PLAN) == (
        "the CUDA backend was asked for, on the CPU."
    )
    told = chosen_because("mine", "gguf", is_requested=False, refusals=["llamacpp: not installed."])
    assert told == "a GGUF file runs on mine (llamacpp: not installed)"
    assert placed("", PLAN) == ""


@pytest.mark.parametrize(
    ("actual", "told"),
    [
        ((900, 500, 100, 100), ""),
        ((1100, 500, 100, 100), "takes 1.8 GB, 12% more than the 1.6 GB that were planned"),
        ((700, 500, 100, 100), "12% less"),
        ((700, -1, 100, 100), "takes 900 MB, 18% less than the 1.1 GB that were planned"),
        ((-1, -1, -1, 160), ""),
    ],
)
def test_a_plan_that_was_over_a_tenth_wrong_is_said(actual: tuple[int, ...], told: str) -> None:
    planned = [900_000_000, 500_000_000, 100_000_000, 100_000_000]
    took = [part * 1_000_000 if part >= 0 else -1 for part in actual]
    found = prediction_error(planned, took)
    assert told in found and bool(found) is bool(told)
