"""Kernels run in Triton's interpreter here, on a CPU, unless TRITON_INTERPRET is set to 0 on a GPU
(tests/conftest.py)."""

from pathlib import Path

import pytest
import torch

from tests.support import triton_interpreter

# Tiny products gain nothing from threads and lose much where the cores are busy.
torch.set_num_threads(1)
triton_interpreter.speed_up()


@pytest.fixture(scope="session")
def compiled_before(pytestconfig: pytest.Config) -> Path:
    """Kernels that earlier runs compiled. Triton finds one again if its source, its options and Triton itself
    are the same; `pytest --cache-clear` forgets them."""
    return pytestconfig.cache.mkdir("triton")
