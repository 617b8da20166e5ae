"""All-reduce of partial sums between the GPUs of one host.

In one launch (`all_reduce`), or inside another kernel (`sum_over_ranks`).

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

    rank: int
    words: torch.Tensor
    """int64 [2, R, E] for the largest E, which all GPUs map. Zeros before the first sum."""
    addresses: torch.Tensor
    """int64 [R]."""
    counts: torch.Tensor
    """int32: sums that each run of 128 numbers has taken part in. Zeros before the first sum."""

    @staticmethod
    def empty(rank: int, words: torch.Tensor, addresses: torch.Tensor) -> "PeerMemory":
        """Return the memory before the first sum. Words must be zeros."""
        runs = _runs(words.shape[2])
        return PeerMemory(
            rank, words, addresses, torch.zeros(runs, dtype=torch.int32, device=words.device)
        )

    @property
    def ranks(self) -> int:
        return self.words.shape[1]

    @property
    def most(self) -> int:
        """Largest number of numbers of a sum."""
        return self.words.shape[2]


def _runs(numbers: int) -> int:
    return -(-numbers // _NUMBERS)


@triton.jit
def sum_over_ranks(
    own,
    run,
    inside,
    words,
    addresses,
    counts,
    room,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return the sum over the ranks of own fp32 [R, 128].

    The ranks are added up in their order. run: of 128 numbers of the result, for each row [R]. inside [R,
    128]: numbers of the result. room: words for one rank. A run must belong to the same numbers in all
    kernels, because its count tells what a word holds."""
    i = run[:, None] * 128 + tl.arange(0, 128)[None, :]
    count = tl.load(counts + i // 128, mask=inside, other=0) + 1
    box = (count & 1) * (room * RANKS)
    message = own.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    message |= count.to(tl.int64) << 32
    for other in tl.static_range(RANKS):
        if other != RANK:
            inbox = tl.load(addresses + other).to(tl.pointer_type(tl.int64))
            # Written through to the other GPU at once.
            tl.store(inbox + box + RANK * room + i, message, mask=inside, cache_modifier=".wt")
    total = tl.zeros(own.shape, tl.float32)
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
                missing = tl.sum(tl.sum(late.to(tl.int32), 1), 0)
            message = tl.load(slot, mask=inside, other=0, volatile=True)
            total += message.to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(counts + i // 128, count, mask=inside)
    return total


@triton.jit(do_not_specialize=["numbers"])
def _all_reduce_kernel(
    source,
    out,
    words,
    addresses,
    counts,
    numbers,
    room,
    S: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    release(PDL)
    run = tl.program_id(0) + tl.arange(0, 1)
    i = run[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = i < numbers
    wait(PDL)
    own = tl.zeros((1, 128), tl.float32)
    for s in tl.static_range(S):
        part = tl.load(source + s * numbers + i, mask=inside, other=0.0, cache_modifier=".cg")
        own += part.to(tl.float32)
    total = sum_over_ranks(own, run, inside, words, addresses, counts, room, RANK, RANKS)
    tl.store(out + i, total, mask=inside)


def all_reduce(y: torch.Tensor, peers: PeerMemory) -> torch.Tensor:
    """Return the sum of the partial sums y [S, P, N] of all ranks: fp32 [1, P, N].

    y: fp32, fp16 or bf16. All ranks call this together, with as many rows and columns, on one stream each.
    ValueError: P * N is more than the memory has room for."""
    splits, rows, columns = y.shape
    device = y.device
    require("y", y, (None, None, None), device)
    numbers = rows * columns
    if numbers > peers.most:
        raise ValueError(f"y: at most {peers.most} numbers wanted, {numbers} given")
    out = torch.empty(1, rows, columns, device=device)
    KernelLaunch(_all_reduce_kernel, (_runs(numbers),), traits(device), warps=1).run(
        *(y, out, peers.words, peers.addresses, peers.counts, numbers, peers.most),
        S=splits,
        RANK=peers.rank,
        RANKS=peers.ranks,
    )
    return out
