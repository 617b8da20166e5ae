"""Kernels run in Triton's interpreter here, on a CPU, unless TRITON_INTERPRET is set to 0 on a GPU
(tests/conftest.py)."""

import pytest
import torch

from tests.support import triton_interpreter
from tests.support.compiled_kernels import KernelCompiler

# Tiny products gain nothing from threads and lose much where the cores are busy.
torch.set_num_threads(1)
triton_interpreter.speed_up()


@pytest.fixture(scope="session")
def compiler(pytestconfig: pytest.Config) -> KernelCompiler:
    """Compiles kernels for GPUs without one. Kernels that earlier runs compiled are found again: `pytest
    --cache-clear` forgets them."""
    record = bool(pytestconfig.getoption("--record-kernels"))
    return KernelCompiler(pytestconfig.cache.mkdir("triton"), record)
