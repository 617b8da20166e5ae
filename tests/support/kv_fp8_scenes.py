"""Shared by tests: coded_scene."""

import torch

from localchat_cuda.kernels.attention import kv_fp8
from localchat_cuda.kernels.attention.reference import AttentionBatch
from tests.support.attention_scenes import scene

NONE = kv_fp8.NONE.value


Coded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def coded(k: torch.Tensor, v: torch.Tensor) -> Coded:
    """Codes of pages, with what spoils whatever reads it where nothing was written."""
    words, marks = zip(*(kv_fp8.encode_reference(each) for each in (k, v)), strict=True)
    pool = torch.stack(words, 1)
    exponents = torch.stack(marks, -1)
    unwritten = k.isnan().any(-1)
    pool[unwritten[:, None].expand(pool.shape[:-1])] = 0x7F7F
    exponents[unwritten] = NONE
    return pool[:, 0], pool[:, 1], exponents


def coded_scene(
    work: list[tuple[int, int]], h: int, j: int, d: int, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """scene(...) with keys of several sizes: a token in three has some of its keys ten times larger."""
    q, k, v, batch = scene(work, h, j, d)
    k[:, :, ::3, : d // 8] *= 10
    v[:, :, ::2] *= 0.01
    return q * scale, *coded(k, v), batch
