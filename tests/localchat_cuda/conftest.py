"""Kernels run in Triton's interpreter here, on a CPU, unless TRITON_INTERPRET is set to 0 on a GPU
(tests/conftest.py)."""

import torch

from tests.support import triton_interpreter

# Tiny products gain nothing from threads and lose much where the cores are busy.
torch.set_num_threads(1)
triton_interpreter.speed_up()
