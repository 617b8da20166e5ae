"""The all-reduce kernel over two processes, which share their inboxes as GPUs do."""

import multiprocessing
from collections.abc import Callable

import pytest
import torch

from localchat_cuda.kernels.all_reduce import PeerMemory, all_reduce
from localchat_cuda.kernels.int4.activations import HalfRows, prepare
from tests.support.seeded import seeded
from tests.support.tiny_engine_core import without_gpu

pytestmark = without_gpu

CPU = torch.device("cpu")

RANKS = 2
ROOM = 4 * 256
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
    return [PeerMemory.empty(rank, words[rank], addresses) for rank in range(RANKS)]


def partial_sums(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    draw = seeded(rank)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]


def run(inbox: PeerMemory, dtype: torch.dtype, out: torch.Tensor) -> None:
    torch.set_num_threads(1)
    for place, y in zip(out, partial_sums(inbox.rank, dtype), strict=True):
        place[: y[0].numel()] = all_reduce(y, inbox).flatten()


def on_both(work: Callable[..., None], *arguments: object, out: torch.Tensor) -> None:
    """Call work(inbox, *arguments, out[rank]) in two processes."""
    made = inboxes()
    other = multiprocessing.get_context("fork").Process(
        target=work, args=(made[1], *arguments, out[1]), daemon=True
    )
    other.start()
    work(made[0], *arguments, out[0])
    other.join()
    assert other.exitcode == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_two_ranks_get_equal_sums_of_all_partial_sums(dtype: torch.dtype) -> None:
    out = shared(RANKS, len(SHAPES), ROOM)
    on_both(run, dtype, out=out)
    parts = [partial_sums(rank, dtype) for rank in range(RANKS)]
    for number, shape in enumerate(SHAPES):
        total = sum(parts[rank][number].float().sum(0) for rank in range(RANKS))
        assert isinstance(total, torch.Tensor)
        size = shape[1] * shape[2]
        torch.testing.assert_close(out[0, number, :size], total.flatten())
        assert torch.equal(out[0, number], out[1, number])


def test_too_many_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 1024 numbers"):
        all_reduce(torch.zeros(1, 6, 200), inboxes()[0])


NORM_ROWS = (1, 3, 2)
"""Rows of norms in turn with sums of as many numbers."""
K = 256


def norms(inbox: PeerMemory, fused: bool, out: torch.Tensor) -> None:
    torch.set_num_threads(1)
    draw = seeded(inbox.rank)
    place = 0
    for rows in NORM_ROWS:
        y = torch.randn(2, rows, K, generator=draw)
        weight = torch.rand(K, generator=seeded(5))
        residual = torch.full((rows, K), 0.5)
        squares = torch.empty(rows, K // 128)
        written = HalfRows.empty(rows, K, CPU)
        prepare(
            "norm",
            y if fused else all_reduce(y, inbox),
            written,
            residual=residual,
            weight=weight,
            squares=squares,
            peers=inbox if fused else None,
        )
        sums = all_reduce(y[:, :1, :200].contiguous(), inbox)
        for part in (written.x, residual, squares, sums):
            out[place : place + part.numel()] = part.flatten().float()
            place += part.numel()


def test_a_norm_that_adds_up_the_ranks_equals_a_sum_and_a_norm() -> None:
    out = shared(2, RANKS, 4 * K * sum(NORM_ROWS))
    for fused in (False, True):
        on_both(norms, fused, out=out[int(fused)])
    assert float(out.abs().max()) > 0
    assert torch.equal(out[0], out[1])


def test_a_norm_of_some_columns_cannot_add_up_ranks() -> None:
    with pytest.raises(ValueError, match="peers: only a norm"):
        prepare("plain", torch.zeros(1, 1, K), HalfRows.empty(1, K, CPU), peers=inboxes()[0])
