"""Measures whether dequantizing the next weight overlaps with the gemm of this one.

The four gemms of a layer in turn, several layers, with the next weight written on a second stream
meanwhile.
"""

from collections.abc import Sequence

import torch

from localchat_cuda.kernels.int4 import gemm_dequant as w4_dequant
from localchat_cuda.kernels.int4 import pack as w4_pack
from scripts.bench.kernels.timing import GPU, SHAPES, Results, error, random_w4, timed

ROWS, LAYERS = (512, 1024, 2048, 4096), 4


class _Products:
    """All gemms of some layers for `m` rows; a dequantized weight goes through one of two buffers."""

    def __init__(self, weights: Sequence[w4_pack.W4], m: int) -> None:
        self._weights = weights
        widest = max(n * k for n, k in SHAPES.values())
        self._buffers = [torch.empty(widest, device=GPU, dtype=torch.float16) for _ in range(2)]
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._inputs = {
            k: torch.randn(m, k, device=GPU, dtype=torch.float16) for _, k in SHAPES.values()
        }
        self.results = [
            torch.empty(m, weight.features_out, device=GPU, dtype=torch.float16)
            for weight in weights
        ]

    def in_turn(self) -> None:
        for number in range(len(self._weights)):
            self._dequantize(number)
            self._multiply(number)

    def ahead(self) -> None:
        here = torch.cuda.current_stream()
        self._dequantize(0)
        for number in range(len(self._weights)):
            if number + 1 < len(self._weights):
                # The previous gemm, already on `here`, was the last to read the buffer.
                self._side.wait_stream(here)
                with torch.cuda.stream(self._side):
                    self._dequantize(number + 1)
            self._multiply(number)
            here.wait_stream(self._side)

    def _dequantize(self, number: int) -> None:
        w4_dequant.dequantize(self._weights[number], self._spread(number))

    def _multiply(self, number: int) -> None:
        x = self._inputs[self._weights[number].features_in]
        torch.matmul(x, self._spread(number).t(), out=self.results[number])

    def _spread(self, number: int) -> torch.Tensor:
        n, k = self._weights[number].features_out, self._weights[number].features_in
        return self._buffers[number % 2][: n * k].view(n, k)


def overlap() -> Results:
    """Microseconds a layer: one after the other, and ahead."""
    found: Results = {}
    names = ("qkv", "o", "gate_up", "down")
    weights = [random_w4(*SHAPES[name]) for _ in range(LAYERS) for name in names]
    for m in ROWS:
        products = _Products(weights, m)
        products.in_turn()
        wanted = [each.clone() for each in products.results]
        products.ahead()
        off = max(error(a, b) for a, b in zip(products.results, wanted, strict=True))
        for name, call in (("in_turn", products.in_turn), ("ahead", products.ahead)):
            us = timed([call]) / LAYERS
            found[f"{name}_M{m}_us"] = us
            print(f"{name:8} M={m:4} {us:7.1f} us a layer, err {off:.1e}", flush=True)
    return found
