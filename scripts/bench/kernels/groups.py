"""Times int4 gemms in groups of 128, 64 and 32, by the library's own choice of kernel.

Each also as a multiple of the time in groups of 128. Groups of 64 take 1.5 % more bytes, of 32 9 %.
"""

from functools import partial

import torch

from localchat_cuda.kernels import int4
from localchat_cuda.kernels.int4 import activations as w4_activations
from localchat_cuda.kernels.int4 import gemm_dequant as w4_dequant
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.weights.formats.weight import bytes_of
from scripts.bench.kernels.timing import (
    FLUSH_BYTES,
    GPU,
    SHAPES,
    Results,
    error,
    random_w4,
    timed,
)

_ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
_GROUPS = (128, 64, 32)


def groups() -> Results:
    found: Results = {}
    for name, (n, k) in SHAPES.items():
        for group in _GROUPS:
            weights = [random_w4(n, k, group)]
            while len(weights) * bytes_of(weights[0]) < FLUSH_BYTES:
                weights.append(random_w4(n, k, group))
            dense = w4_pack.dense(weights[0]).t()
            for m in _ROWS:
                us, off = _gemm_us(weights, dense, m)
                found[f"{name}_g{group}_M{m}_us"] = us
                _print(found, f"{name}_g{group}_M{m}", f"{name}_g128_M{m}", off)
            whole = torch.empty(n, k, dtype=torch.float16, device=GPU)
            calls = [partial(w4_dequant.dequantize, weight, whole) for weight in weights]
            found[f"{name}_g{group}_dequantize_us"] = timed(calls) / len(calls)
            w4_dequant.dequantize(weights[0], whole)
            off = error(whole, dense.t())
            _print(found, f"{name}_g{group}_dequantize", f"{name}_g128_dequantize", off)
            del weights, dense, whole, calls
            torch.cuda.empty_cache()
    return found


def _gemm_us(weights: list[w4_pack.W4], dense: torch.Tensor, m: int) -> tuple[float, float]:
    """(microseconds, error) of one gemm of m rows; infinite time if the result is wrong."""
    x = torch.randn(m, dense.shape[0], device=GPU)
    rows = int4.empty_activations(m, dense.shape[0], GPU, weights[0].group)
    w4_activations.prepare("plain", x[None], rows)
    off = error(int4.gemm(rows, weights[0]).sum(0), x @ dense)
    if not off < 2e-3:
        return float("inf"), off
    calls = [partial(int4.gemm, rows, weight) for weight in weights]
    calls *= -(-24 // len(calls))
    return timed(calls) / len(calls), off


def _print(found: Results, name: str, base: str, off: float) -> None:
    us = found[f"{name}_us"]
    print(
        f"{name:28} {us:8.2f} us, {us / found[f'{base}_us']:.3f} of 128, err {off:.1e}", flush=True
    )
