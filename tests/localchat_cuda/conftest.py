"""Kernels run in Triton's interpreter here, on a CPU, unless TRITON_INTERPRET is set to 0 on a GPU
(tests/conftest.py)."""

import os
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.compiled_kernels import KernelCompiler

# Tests have another home, and torch warns of a folder for such kernels that it cannot make there.
os.environ.setdefault("USE_PYTORCH_KERNEL_CACHE", "0")


@pytest.fixture(scope="session", autouse=True)
def _fast_interpreter() -> None:
    """Set up torch and Triton, if a collected test imports them: importing them takes seconds."""
    if "torch" in sys.modules:
        # Tiny products gain nothing from threads and lose much where the cores are busy.
        sys.modules["torch"].set_num_threads(1)
    if "triton" in sys.modules:
        from tests.support import triton_interpreter

        triton_interpreter.speed_up()


@pytest.fixture(scope="session")
def compiler(pytestconfig: pytest.Config) -> "KernelCompiler":
    """Compiles kernels for GPUs without one. Kernels that earlier runs compiled are found again: `pytest
    --cache-clear` forgets them."""
    from tests.support.compiled_kernels import KernelCompiler

    record = bool(pytestconfig.getoption("--record-kernels"))
    return KernelCompiler(pytestconfig.cache.mkdir("triton"), record)
