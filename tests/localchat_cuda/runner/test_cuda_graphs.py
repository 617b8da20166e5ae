"""When a step is captured and when it is launched kernel by kernel, over a fake of CUDA's graphs."""

import gc
from typing import Any

import pytest
import torch

from localchat_cuda.runner.cuda_graphs import RUNS_BEFORE_CAPTURE, CudaGraphs
from localchat_cuda.runner.input_batch import StepShape

SHAPE = StepShape(1, 1, 1, 1, 1, 0, 0)


class _Graph:
    """Counts replays; its end fails where the capture was spoilt."""

    made: "list[_Graph]" = []  # noqa: RUF012 - emptied by the fixture
    spoilt = False

    def __init__(self) -> None:
        self.replays = 0
        _Graph.made.append(self)

    def capture_begin(self, **how: Any) -> None:
        assert not gc.isenabled()

    def capture_end(self) -> None:
        if _Graph.spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> CudaGraphs:
    _Graph.made, _Graph.spoilt = [], False
    for name, fake in {
        "CUDAGraph": _Graph,
        "graph_pool_handle": lambda: None,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
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


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_shape_without_memory_for_a_graph_is_launched_ever_after(
    graphs: CudaGraphs, spoilt: bool
) -> None:
    log: list[str] = []
    _Graph.spoilt = spoilt

    def short() -> tuple[torch.Tensor, ...]:
        if not gc.isenabled():
            raise torch.OutOfMemoryError("none left")
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
