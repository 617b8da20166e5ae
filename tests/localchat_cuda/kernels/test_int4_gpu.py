"""Activations of int4 gemms on an NVIDIA GPU: every mode, format and order against the reference.

TRITON_INTERPRET=0 pytest tests/localchat_cuda."""

from itertools import product

import pytest

from localchat_cuda.kernels.int4.activations import Mode
from tests.support.int4_activations import compare_prepare
from tests.support.tiny_engine_core import DEVICE, ON_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU, or TRITON_INTERPRET is not 0"),
]


@pytest.mark.parametrize("mode", ["embed", "norm", "act_and_mul", "plain"])
@pytest.mark.parametrize(
    ("kind", "rows", "ordered"),
    [
        *product(["int8", "lanes", "slots"], [1, 5], [False]),
        *product(["int8", "lanes", "slots"], [2, 5], [True]),
        *product(["lanes", "slots"], [45], [False, True]),
    ],
)
def test_prepare_matches_the_reference(mode: Mode, kind: str, rows: int, ordered: bool) -> None:
    compare_prepare(mode, kind, rows, ordered, DEVICE)
