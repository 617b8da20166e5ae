"""Tests of kernels name no device: where kernels run on a GPU, their tensors are made there."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.tiny_engine_core import DEVICE, ON_GPU


@pytest.fixture(autouse=True)
def _default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    if not ON_GPU or request.path.stem.endswith("_gpu"):
        yield
        return
    with DEVICE:
        yield
    torch.cuda.synchronize()  # a fault is an error of the test that caused it
