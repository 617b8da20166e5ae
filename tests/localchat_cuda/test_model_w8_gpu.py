"""Weights of a byte on an NVIDIA GPU. TRITON_INTERPRET=0 pytest tests/localchat_cuda."""

from itertools import product
from pathlib import Path

import pytest
import torch

from localchat_cuda.kernels.fp8_int8 import gemm_dequant as w8_dequant
from localchat_cuda.kernels.fp8_int8 import gemm_fp8
from localchat_cuda.kernels.fp8_int8 import gemm_small as w8_small
from localchat_cuda.kernels.fp8_int8 import gemm_tiled as w8_tiled
from localchat_cuda.kernels.fp8_int8 import gemv as w8_gemv
from localchat_cuda.kernels.fp8_int8 import pack as w8_pack
from localchat_cuda.kernels.fp8_int8 import tile_config as w8_tile_config
from localchat_cuda.kernels.fp8_int8 import tile_ops as w8_tile_ops
from localchat_cuda.kernels.fp8_int8.pack import W8
from localchat_cuda.kernels.fp8_int8.tile_config import gemv_config, small_config, tiled_config
from localchat_cuda.kernels.launch import traits
from tests.support import float_checkpoints, fp8_reference, tiny_models
from tests.support.fp8_checkpoints import save_fp8
from tests.support.gpu_models import HALVES, logs_of
from tests.support.tiny_engine_core import ON_GPU, TinyLoop, request, tiny_runner
from tests.support.tiny_models import tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU, or TRITON_INTERPRET is not 0"),
]
GPU = torch.device("cuda", 0)
KINDS = {
    "row": w8_pack.e4m3_rows,
    "block": fp8_reference.e4m3_blocks,
    "whole": w8_pack.whole_rows,
    "mx": float_checkpoints.mx_weight,
}
WORK = (
    *((kind, 4608, 3584) for kind in KINDS),
    ("block", 3584, 18944),
    ("row", 1000, 1152),
    ("whole", 264, 128),
    ("mx", 1000, 1152),
)
"""The last three have a part of a block of outputs at their end."""
LAYOUTS = ("channel", "deepseek", "nvfp4", "mxfp8")


def halves_of(form: str) -> list[str]:
    """Types of x. MXFP8 is multiplied in bf16 alone."""
    return ["bf16"] if form in ("mx", "mxfp8") else sorted(HALVES)


def ways(dtype: torch.dtype, *, whole: bool) -> list[int]:
    """Those that differ: only e4m3 becomes fp16 in two."""
    native = traits(GPU).fp8 and dtype == torch.float16 and not whole
    return [w8_tile_ops.PACKED, *([w8_tile_ops.NATIVE] if native else [])]


def drawn(kind: str, n: int, k: int) -> W8:
    torch.manual_seed(n + k)
    return KINDS[kind](torch.randn(n, k, device=GPU))


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("half", sorted(HALVES))
@pytest.mark.parametrize("whole", [False, True])
def test_every_code_decodes_exactly_in_every_way(whole: bool, half: str) -> None:
    codes = torch.arange(256, device=GPU).to(torch.uint8).repeat(4).view(8, 128)
    held = torch.ones_like(codes, dtype=torch.bool) if whole else (codes & 127) != 127
    weight = W8(codes if whole else codes.view(w8_pack.E4M3), torch.ones(8, device=GPU))
    for decoder in ways(HALVES[half], whole=whole):
        out = torch.full((8, 128), float("nan"), device=GPU, dtype=HALVES[half])
        w8_dequant.dequantize(weight, out, decoder=decoder)
        assert torch.equal(out.float()[held], w8_pack.values(weight.codes)[held]), decoder


@pytest.mark.parametrize(
    ("kind", "n", "k", "half"), [(*work, half) for work in WORK for half in halves_of(work[0])]
)
def test_gemms_match_their_references(kind: str, n: int, k: int, half: str) -> None:
    weight, sms = drawn(kind, n, k), traits(GPU).sms
    for m in (1, 7, 8, 9, 16, 17, 32, 50, 64):
        x = torch.randn(m, k, device=GPU).to(HALVES[half])
        wanted = w8_small.reference(x, weight)
        cuts = [small_config(m, n, k, sms)] if m <= w8_small.MAX_ROWS else []
        cuts += [tiled_config(m, n, k, sms)] if m > w8_tile_config.SMALL_ROWS else []
        for cut, decoder in product(cuts, ways(x.dtype, whole=weight.whole)):
            call = w8_tiled.gemm if cut.stages else w8_small.gemm
            for _ in range(5):  # a race shows now and then
                out = torch.full((cut.splits, m, n), float("nan"), device=GPU)
                call(x, weight, out, cut, decoder=decoder)
                assert off(out.sum(0), wanted) < 1e-4, (m, decoder, cut)
    x = torch.randn(1, k, device=GPU).to(HALVES[half])
    for decoder in ways(x.dtype, whole=weight.whole):
        out = torch.full((1, 1, n), float("nan"), device=GPU)
        w8_gemv.gemv(x, weight, out, gemv_config(n, k, sms), decoder=decoder)
        assert off(out[0], w8_small.reference(x, weight)) < 1e-5, decoder


@pytest.mark.parametrize("half", sorted(HALVES))
@pytest.mark.parametrize("kind", ["row", "block"])
def test_gemms_with_fp8_activations_match_their_references(kind: str, half: str) -> None:
    if not traits(GPU).fp8:
        pytest.skip("FP8 tensor cores begin with compute capability 8.9")
    weight = drawn(kind, 4608, 3584)
    for m in (65, 128, 300, 1024):
        x = torch.randn(m, 3584, device=GPU).to(HALVES[half])
        found = gemm_fp8.gemm(x, weight)
        assert off(found, fp8_reference.gemm(x, weight)) < 5e-3, m
        assert off(found, w8_small.reference(x, weight)) < 0.05, m


@pytest.mark.parametrize(
    ("layout", "half"), [(layout, half) for layout in LAYOUTS for half in halves_of(layout)]
)
def test_logprobs_of_floating_codes_are_within_twice_the_error_of_torch(
    half: str, layout: str, tmp_path: Path
) -> None:
    model, tokens = tiny_models.reference("llama"), tokens_of(51, 200)
    if layout in float_checkpoints.CONFIGS:
        float_checkpoints.save_floats(model, tmp_path, layout)
    else:
        save_fp8(model, tmp_path, layout)
    exact = logs_of(model, tokens)
    theirs = logs_of(model.to(HALVES[half]).cuda(), tokens) - exact
    for chunk in (7, 30, 64):
        runner = tiny_runner(tmp_path, dtype=HALVES[half], step=chunk)
        told = TinyLoop(runner).say(request(tokens, prompt_logprobs=0, max_tokens=1))
        ours = torch.tensor([entry.logprob for entry in told.prompt_logprobs]) - exact
        ratio = float(ours.norm() / theirs.norm())
        print(f"{layout} {half} chunk {chunk}: {ratio:.2f} of torch's error")
        assert ratio < 2.0
