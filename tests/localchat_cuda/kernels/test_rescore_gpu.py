"""On an NVIDIA GPU: 10,000 draws from a bounded head of a real size are those of the whole head.

TRITON_INTERPRET=0 pytest tests/localchat_cuda."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from localchat.backend_api.step import SamplingParams
from localchat_cuda.kernels import fp8_int8, skinny_gemm
from localchat_cuda.kernels.fp8_int8.bounded_head import bounded_head
from localchat_cuda.kernels.sampling import rescore, sample
from localchat_cuda.kernels.sampling import state as sample_state
from tests.localchat_cuda.kernels.test_sampling import settings_of
from tests.support.tiny_engine_core import ON_GPU

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU, or TRITON_INTERPRET is not 0"),
]

N, K, DRAWS = 152_064, 3_584, 10_000
GPU = torch.device("cuda", 0)
PLAIN = SamplingParams(temperature=1.0, top_p=1.0, min_p=0.0)
SETTINGS = [
    SamplingParams(temperature=0.0),
    PLAIN,
    replace(PLAIN, temperature=0.7, min_p=0.05),
    replace(PLAIN, temperature=0.7, top_k=20, top_p=0.8),
    replace(PLAIN, top_k=64, top_p=0.95),
    replace(PLAIN, temperature=1.5, min_p=0.02),
    replace(PLAIN, temperature=0.3),
    replace(PLAIN, logit_bias=((5, 9.0), (77, -3.0))),
]


def settings() -> sample_state.SamplingTensors:
    held = settings_of([replace(one, seed=i) for i, one in enumerate(SETTINGS)])
    return sample_state.SamplingTensors(*(tensor.to(GPU) for tensor in held))


def states(rows: int, head: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every other row has a winner, and a few tokens near it."""
    x = torch.randn(rows, K, generator=generator, device=GPU) * 2
    pull = torch.tensor([20.0, 18.0, 17.0, 16.5, 15.0], device=GPU)
    for row in range(0, rows, 2):
        lines = head[torch.randint(0, N, (5,), generator=generator, device=GPU)].float()
        x[row] += (pull / lines.square().sum(1)) @ lines
    return x.to(head.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_draws_are_those_of_the_whole_head(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(GPU).manual_seed(rows)
    head = (torch.randn(N, K, generator=generator, device=GPU) * 0.02).to(dtype)
    copy, held = bounded_head(head), settings()
    order = torch.arange(rows, dtype=torch.int32, device=GPU)
    scratch = sample_state.Scratch.empty(rows, N, GPU)
    peaks = rescore.RescoreScratch.empty(rows, N, GPU)
    figures = torch.empty(2, rows, device=GPU)

    def drawn(
        fill: Callable[[torch.Tensor], object], begin: int, rescoring: rescore.Rescoring | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, tokens = torch.empty(rows, N, device=GPU), torch.empty_like(order)
        fill(logits)
        slots = (order + begin // rows) % len(SETTINGS)
        sample.draw(
            logits, sample_state.Draws(order, slots, order + begin), held, scratch, tokens, figures[0],
            figures[1], rescoring=rescoring, rescore_scratch=peaks,
        )  # fmt: skip
        return tokens, logits

    different = torch.zeros(2, dtype=torch.int64, device=GPU)
    for begin in range(0, DRAWS // 8, rows):
        x = states(rows, head, generator).roll(begin // rows // 8 % 2, 0)

        def whole(logits: torch.Tensor, x: torch.Tensor = x) -> None:
            for row in range(rows):
                skinny_gemm.gemm(x[row : row + 1], head, logits[row : row + 1])

        def approximate(logits: torch.Tensor, x: torch.Tensor = x) -> None:
            fp8_int8.logits(x, copy.weight, out=logits)

        wanted, exact = drawn(whole, begin, None)
        found, logits = drawn(approximate, begin, rescore.Rescoring(x, head, copy.bounds))
        at = wanted.long()[:, None]
        different[0] += (wanted != found).sum()
        different[1] += (exact.gather(1, at) != logits.gather(1, at)).sum()
        assert math.isfinite(float(logits.sum()))
    assert different.tolist() == [0, 0]
