"""The guide over an FP8 KV cache says what it says over a bf16 one, and finds what stood before.

The bounds are for text that the weights were trained on: of newer text the guide is less sure.
"""

from pathlib import Path

import pytest
import torch
from checkpoint import GUIDE
from kv8 import measure, unpack


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    if not GUIDE.is_file():
        pytest.skip("this checkout has no guide")
    folder: Path = tmp_path_factory.mktemp("guide")
    unpack(GUIDE, folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(folder, 14, 4, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def test_the_next_token_is_as_likely(told: dict[str, float]) -> None:
    assert told["tokens"] > 1000
    assert 1e-6 < told["kl_bf16_fp8"] < 1e-3
    assert told["kl_bf16_fp8_p99"] < 2e-2
    assert told["same_first"] > 0.98
    assert told["cost_fp8"] == pytest.approx(told["cost_bf16"], abs=2e-3)


def test_what_stood_before_is_found(told: dict[str, float]) -> None:
    assert told["needle_tokens"] > 300
    assert told["found_bf16"] > 0.97
    assert told["found_fp8"] > told["found_bf16"] - 0.01
