"""Dequantizes the FP8 pages of a step's prefill chunks, once per layer, for any attention kernel.

Letters as in reference.py; at most C pages. Every tile of queries and every head of a group reads a prefill
chunk's keys; decoded in each of those reads they cost as much again as the matrix products. Decoded once they
cost one read and one write of the history (7,000 tokens with 4 key heads of 128: 7 and 14 MB, most of it in the
L2 cache of a Hopper), and prefill_hopper.py, which copies keys without converting them, works with this cache.

    sources int32 [C, 2]    (slot, index in its table) of each page of the chunks' histories, then -1
    pool    [C, 2, J, P, D] keys, then values, fp16 or bf16: the input of attention
    table   int32 as the block tables, of these pages; written where a page is decoded

Grid (C, 2J): a program has a page's keys, or values, of one head; programs past the last page return at once,
so that one CUDA graph fits any lengths. Keys stay rotated, as the queries are (kv_fp8.py). A code of 7 bits
times a scale of 4 is exact in fp16 within its range; bf16 rounds it. Entries past a sequence's length are
undefined.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.attention import kv_fp8
from localchat_cuda.kernels.attention.reference import AttentionBatch
from localchat_cuda.kernels.launch import launch_kernel, require
from localchat_cuda.kernels.rope import Cache, require_pages


class DequantizedPages(NamedTuple):
    """Room for decoded pages, and their table; shapes in the module docstring."""

    pool: torch.Tensor
    table: torch.Tensor

    @staticmethod
    def empty(
        pages: int, j: int, page_tokens: int, d: int, dtype: torch.dtype, tables: torch.Tensor
    ) -> "DequantizedPages":
        pool = torch.empty(pages, 2, j, page_tokens, d, dtype=dtype, device=tables.device)
        return DequantizedPages(pool, torch.empty_like(tables))

    def batch(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the same sequences over the decoded pages."""
        return AttentionBatch(batch.starts, batch.counts, batch.lengths, batch.slots, self.table)


@triton.jit(do_not_specialize=["width"])
def _dequantize_kernel(
    cache,
    tables,
    sources,
    pool,
    table,
    width,
    J: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    CODED: tl.constexpr,
):
    target = tl.program_id(0)
    slot = tl.load(sources + target * 2)
    if slot >= 0:
        position = tl.load(sources + target * 2 + 1)
        offset = slot.to(tl.int64) * width + position
        page = tl.load(tables + offset).to(tl.int64)
        which = tl.program_id(1) // J
        head = tl.program_id(1) % J
        if tl.program_id(1) == 0:
            tl.store(table + offset, target)
        n = tl.arange(0, P)
        i = tl.arange(0, D // 2)
        cell = page * cache.page_stride + head * (P * (D // 2)) + n[:, None] * (D // 2) + i[None, :]
        if which == 0:
            words = tl.load(cache.k + cell)
        else:
            words = tl.load(cache.v + cell)
        mark = tl.load(cache.marks + page * cache.mark_stride + head * P + n).to(tl.int32)
        factor = kv_fp8.scales(mark >> which * 8 & 255)
        low, high = kv_fp8.decode(words, CODED)
        row = pool + (target.to(tl.int64) * 2 * J + tl.program_id(1)) * (P * D) + n[:, None] * D
        tl.store(row + i[None, :], (low * factor[:, None]).to(pool.dtype.element_ty))
        tl.store(row + D // 2 + i[None, :], (high * factor[:, None]).to(pool.dtype.element_ty))


def dequantize(
    k: torch.Tensor,
    v: torch.Tensor,
    exponents: torch.Tensor,
    tables: torch.Tensor,
    sources: torch.Tensor,
    plain: DequantizedPages,
) -> None:
    """Write FP8 pages k, v [pages, J, P, D/2] into `plain`.

    P and D are powers of two. If several sources name one page, the table may hold any of them.
    """
    pages, _, j, page_tokens, d = plain.pool.shape
    device = plain.pool.device
    require_pages("k", k, d, device, exponents)
    require_pages("v", v, d, device, exponents)
    require("sources", sources, (pages, 2), device, torch.int32)
    require("tables", tables, tuple(plain.table.shape), device, torch.int32)
    if k.shape[1:3] != (j, page_tokens) or k.shape != v.shape or k.stride() != v.stride():
        raise ValueError(
            f"k, v: pages of {j} heads and {page_tokens} tokens wanted, {k.shape} given"
        )
    launch_kernel(
        _dequantize_kernel,
        (pages, 2 * j),
        *(Cache.of(k, v, exponents), tables, sources, *plain, tables.shape[1]),
        *(j, page_tokens, d, kv_fp8.decoder_of(device)),
        num_warps=4,
    )
