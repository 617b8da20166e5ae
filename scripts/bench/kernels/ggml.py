"""Times gemms with weights in ggml's block formats, by the library's own choice of kernel.

Beside each the share of the memory roof: its bytes once at 4.8 TB/s (an H200; an H100 has 3.35).
"""

from functools import partial

import torch

from localchat_cuda.kernels import ggml
from localchat_cuda.kernels.ggml import gemm_tiles
from localchat_cuda.kernels.ggml.pack import GgmlTensor, GgmlWeight, dense, empty
from localchat_cuda.kernels.int4.activations import Int8Rows, prepare
from localchat_cuda.weights.formats.weight import bytes_of
from scripts.bench.kernels.timing import FLUSH_BYTES, GPU, SHAPES, Results, error, timed

_TYPES = ("Q4_K", "Q6_K", "Q8_0", "Q5_K", "NVFP4")
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_ROOF = 4.8e12


def random_ggml(type_: str, n: int, k: int) -> GgmlTensor:
    """Random codes, and scales that keep products near those of a real layer."""
    found = empty(type_, n, k, GPU)
    for each in filter(torch.is_tensor, found):
        codes = each.view(torch.int8)
        codes.copy_(torch.randint(-128, 128, codes.shape, dtype=torch.int8, device=GPU))
    if found.form.floats:
        assert found.scales is not None
        found.sides.copy_(torch.full_like(found.sides, 0x3838383838383838))  # scales of 1
        found.scales.fill_(0.01 / k**0.5)
        return found
    form, sides = found.form, found.sides if found.scales is None else found.scales
    numbers = sides.view(torch.float16)
    size = 0.01 / k**0.5 * (0.1 if form.factors else 1.0)
    numbers.copy_((torch.rand(numbers.shape, device=GPU) + 0.5) * size)
    if form.factors and form.minimum:  # of six bits, or two of four
        found.sides.view(torch.int8).bitwise_and_(63 if form.group == 32 else 0x77)
    return found


def ggml_part() -> Results:
    found: Results = {}
    for name, (n, k) in SHAPES.items():
        for type_ in _TYPES:
            weights = [GgmlWeight((random_ggml(type_, n, k),))]
            while len(weights) * bytes_of(weights[0]) < FLUSH_BYTES:
                weights.append(GgmlWeight((random_ggml(type_, n, k),)))
            whole = dense(weights[0], torch.bfloat16).t()
            for m in _ROWS:
                us, off = _gemm_us(weights, whole, m)
                share = bytes_of(weights[0]) / _ROOF * 1e6 / us
                found[f"{name}_{type_}_M{m}_us"] = us
                found_text = f"{us:7.2f} us, {share:.2f} of the roof, err {off:.1e}"
                print(f"{name:8} {type_} M={m:2} {found_text}", flush=True)
            out = torch.empty(n, k, dtype=torch.bfloat16, device=GPU)
            us = timed([partial(gemm_tiles.dequantize, each.parts[0], out) for each in weights])
            found[f"{name}_{type_}_dequantize_us"] = us / len(weights)
            print(f"{name:8} {type_} dequantized {us / len(weights):.1f} us", flush=True)
            del weights, whole, out
            torch.cuda.empty_cache()
    return found


def _gemm_us(weights: list[GgmlWeight], whole: torch.Tensor, m: int) -> tuple[float, float]:
    """(microseconds, error) of one gemm of m rows; infinite time if the result is wrong."""
    x = torch.randn(m, whole.shape[0], device=GPU)
    if m <= ggml.FEW_ROWS:
        rows = Int8Rows.empty(m, whole.shape[0], GPU, 16)
        prepare("plain", x[None], rows)
        calls = [partial(ggml.gemm_rows, rows, weight) for weight in weights]
    else:
        calls = [partial(ggml.gemm, x.half(), weight) for weight in weights]
    off = error(calls[0]().sum(0), x @ whole.float())
    if not off < 6e-3:  # of rounding to bf16
        return float("inf"), off
    calls *= -(-24 // len(calls))
    return timed(calls) / len(calls), off
