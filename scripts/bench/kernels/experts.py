"""Checks and times a layer of experts in the shapes of Qwen3-30B-A3B and gpt-oss-20b, by the library's choice.

In W4 and in bf16, and in MXFP4: the whole layer as a decoder layer runs it (norm, router, experts), each launch
of it, and the share of the memory roof, which is the time to read the weights of the chosen experts once.
Weights of several layers rotate, so that none stays in the L2 cache.
"""

from collections.abc import Callable
from functools import partial

import torch

from localchat_cuda.kernels import experts, rms_norm
from localchat_cuda.kernels.experts import blocks, choice
from localchat_cuda.kernels.experts.choice import Router
from localchat_cuda.kernels.int4.pack import BLOCK_K, W4
from localchat_cuda.weights.formats.weight import bytes_of as weight_bytes
from scripts.bench.kernels.timing import EPS, GPU, Results, error, memory_rate, random_w4, timed
from tests.support import int4_reference

WIDTH, INNER, EXPERTS, CHOSEN = 2048, 768, 128, 8
"""Of Qwen3-30B-A3B; gpt-oss-20b has as many columns inside its experts as outside."""
OSS_WIDTH, OSS_EXPERTS, OSS_CHOSEN, OSS_LIMIT = 2880, 32, 4, 7.0
ROWS = (1, 2, 4, 8, 9, 16, 32, 128, 512, 2048)
_LAYERS = 3
"""Of 300 MB in W4: more than six times the L2 cache."""


def _router(
    experts: int = EXPERTS, width: int = WIDTH, chosen: int = CHOSEN, *, biased: bool = False
) -> Router:
    weight = torch.randn(experts, width, device=GPU, dtype=torch.bfloat16) * 0.05
    bias = _bias(experts) if biased else None
    return Router(weight, chosen, normalized=True, bias=bias).counting()


def _bias(rows: int) -> torch.Tensor:
    return torch.randn(rows, device=GPU, dtype=torch.bfloat16)


def w4_layer(group: int = 128) -> experts.Experts:
    return experts.Experts(
        _router(),
        random_w4(EXPERTS * 2 * INNER, WIDTH, group),
        random_w4(EXPERTS * WIDTH, INNER, group),
    )


def float_layer() -> experts.Experts:
    def weight(n: int, k: int) -> torch.Tensor:
        return torch.randn(n, k, device=GPU, dtype=torch.bfloat16).mul_(0.5 / k**0.5)

    return experts.Experts(
        _router(), weight(EXPERTS * 2 * INNER, WIDTH), weight(EXPERTS * WIDTH, INNER)
    )


def mxfp4_layer() -> experts.Experts:
    whole = -(-OSS_WIDTH // BLOCK_K) * BLOCK_K

    def weight(n: int) -> W4:
        blocks = n // 16, whole // BLOCK_K
        codes = torch.randint(-128, 128, (*blocks, 1024), dtype=torch.int8, device=GPU)
        scales = torch.randint(118, 121, (*blocks, 64), dtype=torch.uint8, device=GPU)
        return W4(codes, scales.view(torch.int32), group=32, e2m1=True)

    rows = OSS_EXPERTS * 2 * whole, OSS_EXPERTS * OSS_WIDTH
    router = _router(OSS_EXPERTS, OSS_WIDTH, OSS_CHOSEN, biased=True)
    weights, biases = [weight(n) for n in rows], [_bias(n) for n in rows]
    return experts.Experts(router, weights[0], weights[1], biases[0], biases[1], OSS_LIMIT)


def bytes_of(layer: experts.Experts, chosen: int) -> float:
    """Of the weights of so many experts."""
    return weight_bytes((layer.gate_up, layer.down)) * chosen / layer.router.experts


def run_layer(layer: experts.Experts, y: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """As layers.py runs it: y is the residual, which stays, and one partial sum of zeros is added."""
    residual = y[0]
    if residual.shape[0] <= experts.FEW_ROWS:
        return experts.apply_few(y[1:], residual, gain, layer, EPS)[0]
    packed = experts.packed_rows(residual.shape[0], layer, GPU)
    x = torch.empty(residual.shape, dtype=torch.bfloat16, device=GPU)
    rms_norm.add_norm(y[1:], residual, gain, x, EPS, packed)
    return experts.apply_many(x, packed, layer)


def normed(y: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    x = torch.empty(y.shape[1:], dtype=torch.bfloat16, device=GPU)
    rms_norm.add_norm(None, y[0], gain, x, EPS)
    return x


def checked(layer: experts.Experts, y: torch.Tensor, gain: torch.Tensor) -> float:
    """Error of the layer against plain torch; infinite if a second run differs."""
    found = run_layer(layer, y, gain)
    if not torch.equal(found, run_layer(layer, y, gain)):
        return float("inf")
    return error(found.float().sum(0), experts.reference(normed(y, gain), layer)[0])


def launches(
    layer: experts.Experts, y: torch.Tensor, gain: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Each launch of a layer alone, over the same choices."""
    rows = y.shape[1]
    return (
        _few_launches(layer, y, gain)
        if rows <= experts.FEW_ROWS
        else _many_launches(layer, normed(y, gain))
    )


def _few_launches(
    layer: experts.Experts, y: torch.Tensor, gain: torch.Tensor
) -> dict[str, Callable[[], object]]:
    router, rows = layer.router, y.shape[1]
    reader = layer.gate_up if isinstance(layer.gate_up, W4) else None
    add = partial(choice.add_few, y[1:], y[0], gain, router, EPS, reader)
    few = add()
    choices = few.choices
    found: dict[str, Callable[[], object]] = {"add": add}
    out = torch.empty(router.chosen, rows, router.weight.shape[1], device=GPU)
    inner = torch.zeros(rows * router.chosen, layer.inner, dtype=few.x.dtype, device=GPU)
    found["gate_up"] = partial(experts.multiply, few, layer.first, choices, None, inner)
    found["down"] = partial(experts.multiply, inner, layer.second, choices, None, out)
    return found


def _many_launches(layer: experts.Experts, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    router, rows = layer.router, x.shape[0]
    choices, count = choice.route(x, router), router.experts
    size = experts.block_rows(choices.ids.numel(), count)
    made = blocks.sort(choices.ids, count, size)
    found: dict[str, Callable[[], object]] = {
        "route": partial(choice.route, x, router),
        "sort": partial(blocks.sort, choices.ids, count, size),
    }
    out = torch.empty(router.chosen, rows, router.weight.shape[1], dtype=torch.bfloat16, device=GPU)
    packed = experts.packed_rows(rows, layer, GPU)
    dtype = torch.bfloat16 if packed is None else torch.float16
    inner = torch.zeros(choices.ids.numel(), layer.inner, dtype=dtype, device=GPU)
    if packed is not None:
        missing = packed.x.shape[1] - x.shape[1]
        int4_reference.quantize(torch.nn.functional.pad(x.float(), (0, missing)), packed)
        x = packed.x
    found["gate_up"] = partial(experts.multiply, x, layer.first, choices, made, inner)
    found["down"] = partial(experts.multiply, inner, layer.second, choices, made, out)
    return found


def experts_part(rows: tuple[int, ...] = ROWS) -> Results:
    found: Results = {}
    for form, make in (("w4", w4_layer), ("mxfp4", mxfp4_layer), ("bf16", float_layer)):
        layers = [make() for _ in range(_LAYERS)]
        width = layers[0].router.weight.shape[1]
        gain = torch.rand(width, device=GPU, dtype=torch.bfloat16) + 0.5
        for m in rows:
            y = torch.randn(2, m, width, device=GPU)
            y[1] = 0
            _print_rows(found, form, layers, y, gain)
        del layers
        torch.cuda.empty_cache()
    return found


def _print_rows(
    found: Results, form: str, layers: list[experts.Experts], y: torch.Tensor, gain: torch.Tensor
) -> None:
    rows = y.shape[1]
    off = checked(layers[0], y, gain)
    us = timed([partial(run_layer, layer, y, gain) for layer in layers] * 4) / (4 * len(layers))
    chosen = len(set(choice.route(normed(y, gain), layers[0].router).ids.flatten().tolist()))
    floor = bytes_of(layers[0], chosen) / memory_rate() * 1e6
    flops = 6 * rows * layers[0].router.chosen * y.shape[2] * layers[0].inner
    parts = [launches(layer, y, gain) for layer in layers]
    alone = {
        name: timed([each[name] for each in parts] * 4) / (4 * len(layers)) for name in parts[0]
    }
    text = " ".join(f"{name} {each:.1f}" for name, each in alone.items())
    print(
        f"experts {form:5} M={rows:4} {us:8.2f} us, {chosen:3} chosen, floor {floor:6.2f} us: "
        f"{floor / us:.2f}, {flops / us / 1e6:5.1f} TFLOP/s, err {off:.1e}; {text}",
        flush=True,
    )
    found[f"{form}_M{rows}_us"] = us
    found[f"{form}_M{rows}_roof"] = floor / us
