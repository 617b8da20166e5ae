"""The all-reduce kernel over two processes, which share their inboxes as GPUs do."""

import multiprocessing

import pytest
import torch

from localchat_cuda.kernels.all_reduce import PeerMemory, all_reduce

RANKS = 2
ROOM = 4 * 200
SHAPES = ((1, 1, 5), (3, 1, 200), (2, 4, 200), (1, 2, 128), (3, 1, 200))
"""S, P, N of the sums, in order: more and fewer numbers in turn."""


def shared(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    zeros = torch.zeros(shape, dtype=dtype)
    zeros.share_memory_()  # type: ignore[no-untyped-call]
    return zeros


def inboxes() -> list[PeerMemory]:
    words = [shared(2, RANKS, ROOM, dtype=torch.int64) for _ in range(RANKS)]
    # A forked process has shared memory at the same addresses.
    addresses = torch.tensor([w.data_ptr() for w in words])
    counts = (torch.zeros(PeerMemory.programs(ROOM), dtype=torch.int32) for _ in range(RANKS))
    return [PeerMemory(w, addresses, c) for w, c in zip(words, counts, strict=True)]


def partial_sums(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]


def run(rank: int, inbox: PeerMemory, dtype: torch.dtype, out: torch.Tensor) -> None:
    torch.set_num_threads(1)
    for place, y in zip(out, partial_sums(rank, dtype), strict=True):
        place[: y[0].numel()] = all_reduce(y, inbox, rank).flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_two_ranks_get_equal_sums_of_all_partial_sums(dtype: torch.dtype) -> None:
    made = inboxes()
    out = shared(RANKS, len(SHAPES), ROOM)
    other = multiprocessing.get_context("fork").Process(
        target=run, args=(1, made[1], dtype, out[1]), daemon=True
    )
    other.start()
    run(0, made[0], dtype, out[0])
    other.join()
    assert other.exitcode == 0
    parts = [partial_sums(rank, dtype) for rank in range(RANKS)]
    for number, shape in enumerate(SHAPES):
        total = sum(parts[rank][number].float().sum(0) for rank in range(RANKS))
        assert isinstance(total, torch.Tensor)
        size = shape[1] * shape[2]
        torch.testing.assert_close(out[0, number, :size], total.flatten())
        assert torch.equal(out[0, number], out[1, number])


def test_too_many_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 800 numbers"):
        all_reduce(torch.zeros(1, 5, 200), inboxes()[0], 0)
