"""Computes logits with an output head of any format, and gemms of floating weights.

Letters: P rows, K columns, N output features.
"""

import torch

from localchat_cuda.kernels import ggml, skinny_gemm


def compute_logits(
    x: torch.Tensor,
    head: torch.Tensor | ggml.GgmlWeight,
    cap: float = 0.0,
    *,
    kernels: bool,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logits fp32 [P, vocabulary] of last states x [P, K].

    `cap`: see ModelConfig.head_cap. `out`: buffer for the logits. On a GPU, more than one row goes through the
    library. For 2 to 64 rows of 152,064 x 3,584 it takes 259 to 273 us on an H200, and our kernel 293 to 351 us
    inside a step."""
    if isinstance(head, ggml.GgmlWeight):
        logits = ggml.logits(x, head, kernels=kernels, out=out)
    elif kernels and x.is_cuda and x.shape[0] > 1 and x.dtype != torch.float32:
        logits = torch.mm(x, head.t(), out_dtype=torch.float32, out=out)
    else:
        logits = dense_gemm(x, head, kernels=kernels, out=out).float()
    if out is not None and logits.data_ptr() != out.data_ptr():
        logits = out.copy_(logits)
    if cap:
        logits.div_(cap).tanh_().mul_(cap)
    return logits


def dense_gemm(
    x: torch.Tensor, weight: torch.Tensor, *, kernels: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x w^T, in fp32, or from the library in the model's dtype.

    `out`: buffer for the result of the kernel."""
    rows = x.shape[0]
    if not kernels:
        return skinny_gemm.reference(x, weight)
    if not 1 <= rows <= skinny_gemm.MAX_ROWS or x.dtype == torch.float32:
        return torch.matmul(x, weight.t())
    if out is None:
        out = torch.empty(rows, weight.shape[0], device=x.device)
    skinny_gemm.gemm(x, weight, out)
    return out


def dense_sums(x: torch.Tensor, weight: torch.Tensor, *, kernels: bool) -> torch.Tensor:
    """Return partial sums [S, P, N] of x w^T. Those of the library have the model's dtype, others are fp32."""
    if kernels and 1 <= x.shape[0] <= skinny_gemm.MAX_ROWS and x.dtype != torch.float32:
        return skinny_gemm.partial_sums(x, weight)
    return dense_gemm(x, weight, kernels=kernels)[None]
