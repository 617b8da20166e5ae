"""All-reduce of partial sums between the GPUs of one host, in one launch.

Each rank adds up its own partial sums, writes the result into the inbox of every other rank, waits for theirs,
and adds up all of them in the order of the ranks, so that all ranks get equal bits. A number travels in one
8-byte word beside the count of the sums, as in the LL protocol of NCCL: a word is complete when its count is
that of this sum, so neither fence nor barrier is needed.

A rank writes sum n + 2 only after it has read the others' sum n + 1, which they send after they have read sum
n. So two halves of an inbox, used in turn, never hold a word that is still to be read.

Letters: E numbers of a result, S splits, R ranks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from localchat_cuda.kernels.launch import KernelLaunch, release, require, traits, wait

_NUMBERS = 128
"""Numbers of a program, one warp: one row of 3,584 columns then has 28 programs."""


class PeerMemory(NamedTuple):
    """Inbox of one rank, and the addresses of all inboxes."""

    words: torch.Tensor
    """int64 [2, R, E] for the largest E, which all GPUs map. Zeros before the first sum."""
    addresses: torch.Tensor
    """int64 [R]."""
    counts: torch.Tensor
    """int32: sums that each program has taken part in. Zeros before the first sum."""

    @staticmethod
    def programs(numbers: int) -> int:
        """Return the size of `counts` for results of up to `numbers` numbers."""
        return -(-numbers // _NUMBERS)


@triton.jit(do_not_specialize=["numbers"])
def _all_reduce_kernel(
    source,
    out,
    words,
    addresses,
    counts,
    numbers,
    half,
    S: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    NUMBERS: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    program = tl.program_id(0)
    i = program * NUMBERS + tl.arange(0, NUMBERS)
    inside = i < numbers
    wait(PDL)
    count = tl.load(counts + program) + 1
    own = tl.zeros((NUMBERS,), tl.float32)
    for s in tl.static_range(S):
        part = tl.load(source + s * numbers + i, mask=inside, other=0.0, cache_modifier=".cg")
        own += part.to(tl.float32)
    box = (count & 1) * half
    room = half // RANKS
    message = own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    message |= count.to(tl.int64) << 32
    for other in tl.static_range(RANKS):
        if other != RANK:
            inbox = tl.load(addresses + other).to(tl.pointer_type(tl.int64))
            # Written through to the other GPU at once.
            tl.store(inbox + box + RANK * room + i, message, mask=inside, cache_modifier=".wt")
    total = tl.zeros((NUMBERS,), tl.float32)
    for other in tl.static_range(RANKS):
        if other == RANK:
            total += own
        else:
            slot = words + box + other * room + i
            # Triton 3.6 cannot compile a loop that hands on a block of numbers.
            missing = 1
            while missing > 0:
                message = tl.load(slot, mask=inside, other=0, volatile=True)
                late = inside & ((message >> 32).to(tl.int32) != count)
                missing = tl.sum(late.to(tl.int32), 0)
            message = tl.load(slot, mask=inside, other=0, volatile=True)
            total += message.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(out + i, total, mask=inside)
    tl.store(counts + program, count)


def all_reduce(y: torch.Tensor, peers: PeerMemory, rank: int) -> torch.Tensor:
    """Return the sum of the partial sums y [S, P, N] of all ranks: fp32 [1, P, N].

    y: fp32, fp16 or bf16. All ranks call this together, with as many rows and columns, on one stream each.
    ValueError: P * N is more than the memory has room for."""
    splits, rows, columns = y.shape
    device = y.device
    require("y", y, (None, None, None), (torch.float32, torch.float16, torch.bfloat16), device)
    _, ranks, most = peers.words.shape
    numbers = rows * columns
    if numbers > most:
        raise ValueError(f"y: at most {most} numbers wanted, {numbers} given")
    out = torch.empty(1, rows, columns, device=device)
    gpu = traits(device)
    KernelLaunch(_all_reduce_kernel, (PeerMemory.programs(numbers),), gpu, warps=1).run(
        *(y, out, peers.words, peers.addresses, peers.counts, numbers, ranks * most),
        S=splits,
        RANK=rank,
        RANKS=ranks,
        NUMBERS=_NUMBERS,
    )
    return out
