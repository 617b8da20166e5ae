"""Chooses the experts of each row.

Letters: T rows, K columns, E routed experts, R rows of the router (E, and one for a shared expert's gate), S
splits of K, C choices of a row, P = T * C pairs of a row and a choice, X experts in memory (E and the shared
parts).

    x        fp16 or bf16 [T, K]           router  [R, K] of the same dtype
    logits   fp32 [S, T, R]                partial sums over ranges of K
    ids      int32 [T, C]                  experts, the likeliest first, then those of all rows: E, E + 1, ..
    weights  fp32 [T, C]                   softmax over the E, of the chosen ones alone where the router
                                           normalizes them; of shared parts the sigmoid of logit E.
                                           Of a `sigmoid` router in place of the softmax their sigmoids, and
                                           the choice is by the sigmoid and the bias. Times `scale`

Up to FEW_ROWS rows, one launch adds to the residual and computes the logits of the sum before its norm, as
programs of other columns have the rest of a row. Their readers divide by the rms, from `squares` [T, S]:

    y [S', T, K] partial sums, residual fp32 [T, K], gain [K]
    added    fp32 [T, K]                   residual + sum of y (+ y_bias [K]), beside the residual, which
                                           others still read
    x        [T, K]                        added * gain / 16 in the router's dtype, or fp16 in lane order,
                                           then with zeros up to the columns of the int4 weight that reads it

Of a single row the program that ends last makes the choice, too. Readers that make their own choice load their
weights later: 6 us a layer of Qwen3-30B-A3B on an H200. Sums are in fp32 in the same order for every number of
rows, or of whole numbers. Of equal logits the first wins. A row of NaN has choices with weights of NaN, so it
spoils no other. Grids: logits (R / 16 or 64, T / 16 or 64, S), choose (T,). Not supported: routers of more than
1,024 rows.
"""
# mypy: disable-error-code="assignment"
# (Triton unrolls loops over tuples that grow; no type says that)

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.activation import to_half
from localchat_cuda.kernels.int4.activations import packed_cell
from localchat_cuda.kernels.int4.pack import W4
from localchat_cuda.kernels.launch import (
    KernelLaunch,
    cdiv,
    power_of_two,
    release,
    require,
    tensor_or,
    traits,
    wait,
)

MAX_ROWS = 1024
"""Of a router."""
FEW_ROWS = 8
"""More rows are faster sorted: 16 took 244 us, 17 sorted 79 us (a layer of Qwen3-30B-A3B in W4 on an H200)."""
_SPLITS = 4
_RUN = 128
_FEW_SPLITS = 32
HALVES = (torch.float16, torch.bfloat16)


class Router(NamedTuple):
    """The router of a layer."""

    weight: torch.Tensor
    """[R, K]."""
    chosen: int
    """Experts of a row."""
    normalized: bool
    """The weights of the chosen ones add up to 1."""
    shared: int = 0
    """Parts of a shared expert, which every row takes with the sigmoid of the last logit. 0 without one."""
    bias: torch.Tensor | None = None
    """[R], added to the logits, of a `sigmoid` router to the sigmoids by which experts are chosen."""
    arrivals: torch.Tensor | None = None
    """int32 [1] of 0: counts the programs that have ended, and is 0 again after each launch. None: the choice
    is always a launch of its own."""
    sigmoid: bool = False
    """Experts weigh by sigmoids (DeepSeek-V3, 2024)."""
    scale: float = 1.0
    """Of the weights of chosen experts."""

    def counting(self) -> "Router":
        """The same with a count of arrivals."""
        zero = torch.zeros(1, dtype=torch.int32, device=self.weight.device)
        return self._replace(arrivals=zero)

    @property
    def experts(self) -> int:
        return int(self.weight.shape[0]) - bool(self.shared)

    @property
    def choices(self) -> int:
        return self.chosen + self.shared

    @property
    def stored(self) -> int:
        return self.experts + self.shared


class Choices(NamedTuple):
    """Experts of each row and their weights, [T, C]."""

    ids: torch.Tensor
    weights: torch.Tensor


class FewRows(NamedTuple):
    """Up to FEW_ROWS rows before their norm, and their choices."""

    x: torch.Tensor
    added: torch.Tensor
    squares: torch.Tensor
    eps: float
    width: int
    """K."""
    choices: Choices


class RouterConstants(NamedTuple):
    """Constants of the kernels. For the letters see the module docstring."""

    R: int
    E: int
    K: int
    SPLITS: int
    """Ranges of K."""
    CHOSEN: int
    C: int
    NORMALIZED: bool
    SIGMOID: bool
    SCALE: float
    BIASED: bool


def reference(x: torch.Tensor, router: Router) -> Choices:
    """`route` in plain torch."""
    plain = x.float() @ router.weight.float().t()
    logits = plain if router.bias is None else plain + router.bias.float()
    if router.sigmoid:
        scores = plain[:, : router.experts].sigmoid()
        bias = 0.0 if router.bias is None else router.bias[: router.experts].float()
        ids = torch.topk(scores + bias, router.chosen, 1).indices
        weights = scores.gather(1, ids)
    else:
        weights, ids = torch.topk(logits[:, : router.experts].softmax(1), router.chosen, 1)
    if router.normalized:
        weights = weights / weights.sum(1, keepdim=True)
    weights = weights * router.scale
    if router.shared:
        parts = torch.arange(router.shared, device=x.device) + router.experts
        ids = torch.cat((ids, parts.expand(len(x), -1)), 1)
        weights = torch.cat((weights, logits[:, -1:].sigmoid().expand(-1, router.shared)), 1)
    return Choices(ids.to(torch.int32), weights)


@triton.jit(do_not_specialize=["T"])
def _logits_kernel(
    x,
    weight,
    out,
    T,
    R: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    r = tl.program_id(0) * TILE + tl.arange(0, TILE)
    t = tl.program_id(1) * TILE + tl.arange(0, TILE)
    split = tl.program_id(2)
    k = tl.arange(0, BK)
    steps: tl.constexpr = (K + BK - 1) // BK
    ws = weight + tl.minimum(r, R - 1)[:, None] * K
    xs = x + tl.minimum(t, T - 1)[None, :] * K
    acc = tl.zeros((TILE, TILE), tl.float32)
    wait(PDL)
    for c in tl.range(split * steps // SPLITS, (split + 1) * steps // SPLITS, num_stages=3):
        columns = c * BK + k
        w = tl.load(ws + columns[None, :], mask=(columns < K)[None, :], other=0.0)
        acc = tl.dot(w, tl.load(xs + columns[:, None], mask=(columns < K)[:, None], other=0.0), acc)
    where = (split * T + t)[None, :] * R + r[:, None]
    tl.store(out + where, acc, mask=(t < T)[None, :] & (r < R)[:, None])


@triton.jit(do_not_specialize=["T"])
def _few_logits_kernel(
    y,
    y_bias,
    residual,
    gain,
    weight,
    x,
    added,
    logits,
    squares,
    bias,
    choices,
    arrivals,
    eps,
    T,
    router: tl.constexpr,
    KX: tl.constexpr,
    PARTS: tl.constexpr,
    M: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    Y_BIASED: tl.constexpr,
    CHOOSE: tl.constexpr,
    PDL: tl.constexpr,
):
    K: tl.constexpr = router.K
    release(PDL)
    block = tl.program_id(0)
    split = tl.program_id(1)
    r = block * 16 + tl.arange(0, 16)
    k = tl.arange(0, BK)
    steps: tl.constexpr = (K + BK - 1) // BK
    first = split * steps // router.SPLITS
    ws = weight + tl.minimum(r, router.R - 1)[:, None] * K
    sums = ()
    totals = ()
    for _ in tl.static_range(M):
        sums = sums + (tl.zeros((16,), tl.float32),)
        totals = totals + (tl.zeros((1,), tl.float32),)
    # The first tile's weights are loaded before the wait for the residual.
    w = tl.load(ws + (first * BK + k)[None, :], mask=(first * BK + k < K)[None, :], other=0.0)
    wait(PDL)
    for c in tl.range(first, (split + 1) * steps // router.SPLITS, num_stages=1):
        columns = c * BK + k
        if c > first:
            w = tl.load(ws + columns[None, :], mask=(columns < K)[None, :], other=0.0)
        g = tl.load(gain + columns, mask=columns < K, other=0.0).to(tl.float32)
        rows = ()
        for t in tl.static_range(M):
            inside = columns < K * tl.minimum(T - t, 1)
            v = tl.load(residual + t * K + columns, mask=inside, other=0.0)
            more = tl.zeros((BK,), tl.float32)
            for s in tl.static_range(PARTS):
                more += tl.load(y + (s * T + t) * K + columns, mask=inside, other=0.0).to(
                    tl.float32
                )
            v += more
            if Y_BIASED:
                v += tl.load(y_bias + columns, mask=columns < K, other=0.0).to(tl.float32)
            rows = rows + (v,)
        grown = ()
        longer = ()
        for t in tl.static_range(M):
            v = rows[t]
            scaled = v * g * 0.0625
            # In fp32: in bf16 a row would have other choices before its norm than after it. And no tensor core:
            # moving eight rows to its operands costs more than these products.
            grown = grown + (sums[t] + tl.sum(w.to(tl.float32) * scaled[None, :], 1),)
            longer = longer + (totals[t] + tl.sum(v * v, 0),)
            if block == 0:
                count = tl.minimum(T - t, 1)
                tl.store(added + t * K + columns, v, mask=columns < K * count)
                if GROUP > 0:
                    there = t * KX + packed_cell(columns, GROUP, True)
                    tl.store(x + there, to_half(scaled), mask=columns < KX * count)
                elif weight.dtype.element_ty == tl.float16:
                    tl.store(x + t * K + columns, to_half(scaled), mask=columns < K * count)
                else:
                    half = scaled.to(weight.dtype.element_ty)
                    tl.store(x + t * K + columns, half, mask=columns < K * count)
        sums = grown
        totals = longer
    for t in tl.static_range(M):
        tl.store(
            logits + (split * T + t) * router.R + r,
            sums[t],
            mask=r < router.R * tl.minimum(T - t, 1),
        )
        if block == 0:
            row = t + tl.arange(0, 1)
            tl.store(squares + row * router.SPLITS + split, totals[t], mask=row < T)
    if CHOOSE:
        tl.debug_barrier()  # the stores of all warps come before the count of one thread
        programs = tl.num_programs(0) * tl.num_programs(1)
        if tl.atomic_add(arrivals, 1) == programs - 1:
            tl.store(arrivals, 0)
            _choose_row(logits, squares, bias, choices, 0, T, eps, router, True)


@triton.jit
def inverse_rms(squares, t, eps, K: tl.constexpr, SPLITS: tl.constexpr):
    """Compute what x of `_few_logits_kernel` in the rows t [N] is to be multiplied with."""
    parts = tl.load(squares + t[:, None] * SPLITS + tl.arange(0, SPLITS)[None, :])
    return tl.rsqrt(tl.sum(parts, 1) / K + eps) * 16.0


@triton.jit
def _row_logits(logits, squares, t, T, eps, router: tl.constexpr, FEW: tl.constexpr):
    """Load the logits [R_POW2] of row t without bias, before the norm if FEW."""
    R_POW2: tl.constexpr = triton.next_power_of_2(router.R)
    SPLITS: tl.constexpr = router.SPLITS
    i = tl.arange(0, R_POW2)
    s = tl.arange(0, SPLITS)
    parts = logits + (s[:, None] * T + t) * router.R + i[None, :]
    # One load: a load of each range in turn took 1.2 us longer.
    v = tl.sum(tl.load(parts, mask=(i < router.R)[None, :], other=0.0), 0)
    if FEW:
        v *= tl.sum(inverse_rms(squares, t + tl.arange(0, 1), eps, router.K, SPLITS), 0)
    return v


@triton.jit
def _ranked(v, correction, router: tl.constexpr):
    """Return rank and weight of each expert by logits v: int32 and fp32 like v. `correction`: of sigmoids."""
    CHOSEN: tl.constexpr = router.CHOSEN
    i = tl.arange(0, v.shape[0])
    routed = i < router.E
    s = v
    if router.SIGMOID:
        p = 1.0 / (1.0 + tl.exp(-v))
        s = p + correction
    # NaN ranks last, in order: no row takes an expert twice, whatever its logits are.
    key = tl.where(s > -1e30, tl.minimum(s, 1e30), -1e30)
    key = tl.where(routed, key, float("-inf"))
    if not router.SIGMOID:
        p = tl.exp(v - tl.max(key, 0))
    p = tl.where(routed, p, 0.0)
    rank = i * 0 + router.E
    for j in tl.static_range(CHOSEN):
        best = i == tl.argmax(key, 0)
        rank = tl.where(best, j, rank)
        key = tl.where(best, float("-inf"), key)
    if router.NORMALIZED:
        counted = tl.where((p == p) & (rank < CHOSEN), p, 0.0)
        if router.SIGMOID:  # all may be tiny, and the sum is of whole numbers
            highest = tl.maximum(tl.max(counted, 0), 1e-30)
            counted = counted / highest
            p = p / highest
    else:
        counted = tl.where(p == p, p, 0.0)
    if router.NORMALIZED or not router.SIGMOID:
        # Whole numbers have one sum in whatever order they are added.
        total = tl.sum((tl.minimum(counted, 1.0) * 1073741824.0).to(tl.int64), 0)
        p = p / (total.to(tl.float32) / 1073741824.0)
    return rank, p


@triton.jit(do_not_specialize=["T"])
def _choose_kernel(
    logits,
    squares,
    bias,
    choices,
    eps,
    T,
    router: tl.constexpr,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    wait(PDL)
    _choose_row(logits, squares, bias, choices, tl.program_id(0), T, eps, router, FEW)


@triton.jit
def _choose_row(
    logits,
    squares,
    bias,
    choices,
    t,
    T,
    eps,
    router: tl.constexpr,
    FEW: tl.constexpr,
):
    """Write the choices of row t."""
    R_POW2: tl.constexpr = triton.next_power_of_2(router.R)
    i = tl.arange(0, R_POW2)
    c = tl.arange(0, triton.next_power_of_2(router.C))
    v = _row_logits(logits, squares, t, T, eps, router, FEW)
    own = tl.zeros((R_POW2,), tl.float32)
    if router.BIASED:
        own = tl.load(bias + i, mask=i < router.R, other=0.0).to(tl.float32)
    v += tl.where(i < router.E, 0.0, own) if router.SIGMOID else own
    rank, p = _ranked(v, own, router)
    hit = rank[None, :] == c[:, None]
    chosen = tl.sum(tl.where(hit, i[None, :], 0), 1)
    weight = tl.sum(tl.where(hit, p[None, :], 0.0), 1)
    if router.SCALE != 1.0:
        weight *= router.SCALE
    if router.C > router.CHOSEN:
        gate = tl.sum(tl.where(i == router.E, v, 0.0), 0)
        chosen = tl.where(c >= router.CHOSEN, router.E + c - router.CHOSEN, chosen)
        weight = tl.where(c >= router.CHOSEN, 1.0 / (1.0 + tl.exp(-gate)), weight)
    tl.store(choices.ids + t * router.C + c, chosen, mask=c < router.C)
    tl.store(choices.weights + t * router.C + c, weight, mask=c < router.C)


def route(x: torch.Tensor, router: Router) -> Choices:
    """Choose the experts of rows x [T, K]."""
    (t, k), device = x.shape, x.device
    _check(router)
    require("x", x, (t, k), device, *HALVES)
    require("router", router.weight, (None, k), device, x.dtype)
    r = router.weight.shape[0]
    tile = 16 if t <= 64 else 64
    logits = torch.empty(_SPLITS, t, r, device=device)
    grid = (cdiv(r, tile), cdiv(t, tile), _SPLITS)
    KernelLaunch(_logits_kernel, grid, traits(device), warps=4).run(
        x, router.weight, logits, t, r, k, tile, _RUN, _SPLITS
    )
    ids = torch.empty(t, router.choices, dtype=torch.int32, device=device)
    choices = Choices(ids, torch.empty(t, router.choices, device=device))
    _choose(logits, None, 0.0, router, choices)
    return choices


def add_few(
    y: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor,
    router: Router,
    eps: float,
    reader: W4 | None = None,
    y_bias: torch.Tensor | None = None,
) -> FewRows:
    """Add `y` to the residual, and choose the experts of the sum. Shapes are in the module docstring.

    `reader`: the int4 weight that reads x; None: a floating one does.
    """
    (t, k), device, weight = residual.shape, residual.device, router.weight
    _check(router)
    if not 1 <= t <= FEW_ROWS:
        raise ValueError(f"residual: 1 to {FEW_ROWS} rows wanted, {t} given")
    require("residual", residual, (t, k), device, torch.float32)
    require("y", y, (None, t, k), device)
    require("gain", gain, (k,), device)
    require("router", weight, (None, k), device, *HALVES)
    if y_bias is not None:
        require("y_bias", y_bias, (k,), device)
    r = weight.shape[0]
    # Ranges of K: as many as there are runs, a power of two.
    splits = min(_FEW_SPLITS, power_of_two(cdiv(k, _RUN)))
    columns = k if reader is None else reader.features_in
    dtype = weight.dtype if reader is None else torch.float16
    x = torch.empty(t, columns, dtype=dtype, device=device)
    added = torch.empty_like(residual)
    squares = torch.empty(t, splits, device=device)
    logits = torch.empty(splits, t, r, device=device)
    ids = torch.empty(t, router.choices, dtype=torch.int32, device=device)
    weights = torch.empty(t, router.choices, device=device)
    arrivals = router.arrivals if t == 1 else None
    choices = Choices(ids, weights)
    sums = (y, tensor_or(y_bias, gain), residual, gain)
    results = (x, added, logits, squares, tensor_or(router.bias, logits), choices)
    KernelLaunch(_few_logits_kernel, (cdiv(r, 16), splits), traits(device), warps=4, rows=t).run(
        *(*sums, weight, *results, tensor_or(arrivals, ids), eps, t, _constants(router, splits)),
        KX=columns,
        PARTS=y.shape[0],
        M=power_of_two(t),
        BK=_RUN,
        GROUP=0 if reader is None else reader.group,
        Y_BIASED=y_bias is not None,
        CHOOSE=arrivals is not None,
    )
    if arrivals is None:
        _choose(logits, squares, eps, router, choices)
    return FewRows(x, added, squares, eps, k, choices)


def few_arguments(
    x: torch.Tensor | FewRows, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return x, squares and eps for the kernels of products.

    Without few rows no kernel reads the tensor `unused`.
    """
    if isinstance(x, FewRows):
        return x.x, x.squares, x.eps
    return x, unused, 0.0


def _check(router: Router) -> None:
    if router.bias is not None:
        require("router.bias", router.bias, (len(router.weight),), router.weight.device)
    if not router.chosen <= router.experts or len(router.weight) > MAX_ROWS:
        raise ValueError(
            f"router: at most {MAX_ROWS} rows wanted, {router.chosen} of {len(router.weight)} given"
        )


def _constants(router: Router, splits: int) -> RouterConstants:
    r, k = router.weight.shape
    flags = (router.normalized, router.sigmoid, router.scale, router.bias is not None)
    return RouterConstants(r, router.experts, k, splits, router.chosen, router.choices, *flags)


def _choose(
    logits: torch.Tensor,
    squares: torch.Tensor | None,
    eps: float,
    router: Router,
    choices: Choices,
) -> None:
    splits, t, _ = logits.shape
    few = squares is not None
    KernelLaunch(_choose_kernel, (t,), traits(logits.device), warps=4, rows=t if few else 0).run(
        *(logits, tensor_or(squares, logits), tensor_or(router.bias, logits), choices, eps, t),
        *(_constants(router, splits), few),
    )
