"""RMSNorm over all queries of a token, and over all its keys, before their rotation.

Letters: T tokens, S partial sums, Q columns of queries, K of keys and of values.

    qkv [S, T, Q + 2 K] fp32, fp16 or bf16: the output of the qkv gemm
    out [T, Q + 2 K] fp32: the sum over S: queries / rms * q_norm [Q], keys / rms * k_norm [K], and values

Grid (T, 3), a program for the queries, the keys or the values of a token; fp32 inside. OLMo 2 (OLMo Team, 2024,
arXiv 2501.00656) norms so; models that norm each head by itself do it in rope.py.
"""

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import (
    KernelLaunch,
    power_of_two,
    release,
    require,
    row_warps,
    traits,
    wait,
)


def reference(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """`normalize` in plain torch, same arguments."""
    queries = q_norm.shape[0]
    keys = k_norm.shape[0]
    out.copy_(qkv.float().sum(0))
    for part, gain in ((out[:, :queries], q_norm), (out[:, queries : queries + keys], k_norm)):
        inverse = torch.rsqrt(part.square().mean(-1, keepdim=True) + eps)
        part.mul_(inverse).mul_(gain.float())


@triton.jit(do_not_specialize=["T"])
def _normalize_kernel(
    qkv,
    q_norm,
    k_norm,
    out,
    eps,
    T,
    Q: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    S: tl.constexpr,
    ROOMY: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    width = tl.where(part == 0, Q, K)
    begin = tl.where(part == 0, 0, Q + (part - 1) * K)
    i = tl.arange(0, BLOCK)
    inside = i < width
    offsets = begin + i
    wait(PDL)
    x = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(S):
        x += tl.load(qkv + (s * T + t) * (Q + 2 * K) + offsets, mask=inside, other=0.0).to(
            tl.float32
        )
    if part < 2:
        gain = q_norm if part == 0 else k_norm
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        x = x * tl.load(gain + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * (Q + 2 * K) + offsets, x, mask=inside)


def normalize(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """Sum and normalize; shapes in the module docstring. Both weights are of one dtype."""
    queries = q_norm.shape[0]
    keys = k_norm.shape[0]
    device = qkv.device
    columns = queries + 2 * keys
    splits, t = qkv.shape[:2]
    require("qkv", qkv, (splits, t, columns), device)
    require("q_norm", q_norm, (queries,), device)
    require("k_norm", k_norm, (keys,), device, q_norm.dtype)
    require("out", out, (t, columns), device, torch.float32)
    if t == 0:
        return
    gpu = traits(device)
    block = power_of_two(max(queries, keys))
    KernelLaunch(_normalize_kernel, (t, 3), gpu, warps=row_warps(block), rows=t).run(
        *(qkv, q_norm, k_norm, out, eps, t), Q=queries, K=keys, BLOCK=block, S=splits
    )
