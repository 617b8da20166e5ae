"""Unpacked copies of packed weights take the memory that the plan counts."""

from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from localchat.fit.load_options import LoadOptions
from localchat_cuda.config.reader import parse_config
from localchat_cuda.kernels import launch
from localchat_cuda.kernels.int4 import gemm_dequant, gemm_e4m3
from localchat_cuda.kernels.int4.pack import E4M3Copy
from localchat_cuda.plan.memory_plan import plan
from localchat_cuda.plan.weight_sizes import unpacked_bytes
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.meta_weights import META, MetaWeights
from localchat_cuda.weights.model_weights import with_unpacked
from tests.support.cuda_configs import AWQ, QWEN25
from tests.support.cuda_machines import GB, gpu


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_imagined", [launch.Traits.of((9, 0), 132)])
    # Tensors without numbers have sizes alone, so nothing needs to be compiled.
    monkeypatch.setattr(gemm_e4m3, "_unpack_kernel", MagicMock())
    monkeypatch.setattr(gemm_dequant, "_dequantize_kernel", MagicMock())


@pytest.mark.parametrize(("group", "kind"), [(128, E4M3Copy), (64, torch.Tensor)])
def test_copies_on_a_hopper_gpu_are_as_large_as_planned(group: int, kind: type) -> None:
    raw = QWEN25 | {"num_hidden_layers": 2, "quantization_config": {**AWQ, "group_size": group}}
    config = parse_config(raw, "it")
    weights = load(config, MetaWeights(), META)
    copied = with_unpacked(weights, torch.float16)
    assert copied.copy_type is kind
    added = copied.bytes - weights.bytes
    assert added == unpacked_bytes(config, hopper=True)
    assert (added < unpacked_bytes(config)) == (kind is E4M3Copy)
    hopper = replace(gpu(140 * GB, 141 * GB), compute_capability=(9, 0))
    assert plan(config, [], LoadOptions(max_slots=8), hopper).unpacked_bytes == added


def test_a_library_without_this_gemm_gets_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_e4m3, "serves", lambda device: False)
    config = parse_config(QWEN25 | {"num_hidden_layers": 2, "quantization_config": AWQ}, "it")
    weights = load(config, MetaWeights(), META)
    assert with_unpacked(weights, torch.float16).copy_type is None
