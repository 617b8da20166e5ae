"""When a step is captured and when it is launched kernel by kernel, over a fake of CUDA's graphs."""

import gc
from typing import Any

import pytest
import torch

from localchat_cuda.runner import cuda_graphs
from localchat_cuda.runner.cuda_graphs import (
    _COVERED_RUNS,
    MIN_GRAPHS,
    RUNS_BEFORE_CAPTURE,
    CudaGraphs,
    ResultBuffer,
)
from localchat_cuda.runner.input_batch import StepShape

SHAPE = StepShape(1, 1, 1, 1, 1, 0, 0)


class _Graph:
    """Counts replays; its end fails where the capture was spoilt, and takes memory of the driver's."""

    made: "list[_Graph]" = []  # noqa: RUF012 - emptied by the fixture
    spoilt: BaseException | None = None
    takes_bytes = 0
    free_bytes = 1000

    def __init__(self) -> None:
        self.replays = 0
        _Graph.made.append(self)

    def capture_begin(self, **how: Any) -> None:
        assert not gc.isenabled()

    def capture_end(self) -> None:
        if _Graph.spoilt:
            raise _Graph.spoilt
        _Graph.free_bytes -= _Graph.takes_bytes

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> CudaGraphs:
    _Graph.made, _Graph.spoilt, _Graph.takes_bytes, _Graph.free_bytes = [], None, 0, 1000
    for name, fake in {
        "CUDAGraph": _Graph,
        "graph_pool_handle": lambda: None,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (_Graph.free_bytes, 1000),
        "memory_reserved": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return CudaGraphs(enabled=True)


def _work(log: list[str]) -> Any:
    def work() -> tuple[torch.Tensor, ...]:
        log.append("launched")
        return (torch.zeros(1),)

    return work


def test_a_shape_is_captured_when_it_has_come_often_and_replayed_from_then_on(
    graphs: CudaGraphs,
) -> None:
    log: list[str] = []
    for _ in range(RUNS_BEFORE_CAPTURE):
        graphs.run("drawn", SHAPE, _work(log))
        assert not graphs.steady
    assert graphs.count == 0
    for _ in range(3):
        graphs.run("drawn", SHAPE, _work(log))
        assert gc.isenabled()
    assert graphs.count == 1
    assert log == ["launched"] * (RUNS_BEFORE_CAPTURE + 1)
    assert [one.replays for one in _Graph.made] == [3]
    graphs.run("states", SHAPE, _work(log))
    assert graphs.count == 1


INVALIDATED = torch.AcceleratorError(
    "CUDA error: operation failed due to a previous error during capture"
)
LOADED = RuntimeError("Triton Error [CUDA]: out of memory")
INSTANTIATED = torch.AcceleratorError("CUDA error: out of memory")


@pytest.mark.parametrize(
    ("inside", "spoilt"),
    [
        (torch.OutOfMemoryError("none left"), None),
        (torch.OutOfMemoryError("none left"), INVALIDATED),
        (LOADED, INVALIDATED),
        (INVALIDATED, INVALIDATED),
        (None, INSTANTIATED),
    ],
    ids=["allocator", "allocator, spoilt", "module", "freed in the capture", "instantiation"],
)
def test_a_shape_without_memory_for_a_graph_is_launched_ever_after(
    graphs: CudaGraphs, inside: Exception | None, spoilt: Exception | None
) -> None:
    log: list[str] = []
    _Graph.spoilt = spoilt

    def short() -> tuple[torch.Tensor, ...]:
        if not gc.isenabled():
            if inside is not None:
                raise inside
            return (torch.zeros(1),)
        log.append("launched")
        return (torch.zeros(1),)

    for _ in range(RUNS_BEFORE_CAPTURE + 3):
        graphs.run("drawn", SHAPE, short)
    assert log == ["launched"] * (RUNS_BEFORE_CAPTURE + 3)
    assert graphs.count == 0 and graphs.steady and len(_Graph.made) == 1


def test_another_failure_of_a_capture_is_not_hidden(graphs: CudaGraphs) -> None:
    for _ in range(RUNS_BEFORE_CAPTURE):
        graphs.run("drawn", SHAPE, _work([]))

    def wrong() -> tuple[torch.Tensor, ...]:
        raise ValueError("shapes differ")

    with pytest.raises(ValueError, match="shapes differ"):
        graphs.run("drawn", SHAPE, wrong)
    assert gc.isenabled()


def _capture(graphs: CudaGraphs, *kinds: str) -> None:
    for kind in kinds:
        for _ in range(RUNS_BEFORE_CAPTURE + 1):
            graphs.run(kind, SHAPE, _work([]))


def test_the_graph_that_was_not_used_for_longest_goes_first(
    graphs: CudaGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_max_graphs", 2)
    _capture(graphs, "a", "b", "a", "c")
    assert graphs.count == 2
    made = len(_Graph.made)
    _capture(graphs, "a", "c")
    assert len(_Graph.made) == made, "one that was used is captured again"
    # One that comes back has to come as often as a new one: it may alternate with others.
    log: list[str] = []
    for _ in range(RUNS_BEFORE_CAPTURE):
        graphs.run("b", SHAPE, _work(log))
    assert len(log) == RUNS_BEFORE_CAPTURE and len(_Graph.made) == made
    assert cuda_graphs.GRAPHS >= 64


def test_graphs_take_no_more_of_the_drivers_memory_than_planned(graphs: CudaGraphs) -> None:
    bounded = CudaGraphs(enabled=True, limit_bytes=100)
    _Graph.takes_bytes = 40
    _capture(bounded, "a", "b", "c")
    assert (bounded.count, bounded.bytes) == (3, 120)
    assert bounded.full and not graphs.full
    _capture(bounded, "d")
    # One over the limit at most: what the next takes is not known before.
    assert bounded.count == 3 and bounded.bytes <= 100 + 40
    bounded.clear()
    assert (bounded.count, bounded.bytes) == (0, 0)


def test_fewer_graphs_are_kept_after_memory_ran_out(graphs: CudaGraphs) -> None:
    many = [str(n) for n in range(50)]
    _capture(graphs, *many)
    graphs.shrink()
    assert graphs.count == 0
    _capture(graphs, *many)
    assert graphs.count == 25
    # Few graphs are not to blame.
    graphs.clear()
    _capture(graphs, *many[:MIN_GRAPHS])
    graphs.shrink()
    _capture(graphs, *many)
    assert graphs.count == 25


def test_results_of_all_graphs_share_memory_that_grows_to_the_largest() -> None:
    buffer = ResultBuffer(5, torch.float32, torch.device("cpu"))
    few = buffer.rows(3)
    assert (few.shape, buffer.rows(2).data_ptr()) == ((3, 5), few.data_ptr())
    many = buffer.rows(9)
    assert many.shape == (9, 5) and many.data_ptr() != few.data_ptr()
    assert buffer.rows(3).data_ptr() == buffer.rows(16).data_ptr() == many.data_ptr()


def test_a_shape_runs_in_larger_graphs_until_it_has_occurred_often(graphs: CudaGraphs) -> None:
    larger = StepShape(64, 64, 64, 1, 1, 0, 0)
    with_prompts = StepShape(512, 64, 64, 1, 1, 8, 12)
    small = StepShape(8, 8, 8, 1, 1, 0, 0)
    for shape in (larger, with_prompts):
        for _ in range(RUNS_BEFORE_CAPTURE + 1):
            graphs.run("sampled", shape, _work([]))
    assert graphs.covers("penalised", small) == []
    assert graphs.covers("sampled", larger) == []
    covered = [graphs.covers("sampled", small) for _ in range(_COVERED_RUNS + 1)]
    assert covered == [[larger]] * _COVERED_RUNS + [[]]
