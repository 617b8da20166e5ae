"""Engines over two processes and gloo: texts of one rank, and what the end of a rank does.

It takes longer than five seconds because every engine starts two processes that import torch. The contract
suite runs over two ranks, too."""

import os
import pickle
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from localchat.engine.events import Text
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Grammar, Sampling, TextPrompt
from localchat.errors import DeviceFault, DoesNotFit, EngineDied, UsageError
from localchat.fit.load_options import LoadOptions
from localchat_cuda.ranks import messages, workers
from localchat_cuda.ranks.messages import RankJob
from tests.support.answers import ask
from tests.support.speaking_checkpoint import write_speaking

pytestmark = pytest.mark.process
BACKEND = "localchat_cuda.backend:ReferenceBackend"
PATIENCE_S = 30.0
LONG = "Once upon a time there was a machine with two cards. " * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaking(tmp_path_factory.mktemp("speaking"))


def opened(folder: Path, gpus: int = 2) -> LocalEngine:
    options = EngineOptions(
        folder,
        LoadOptions(
            context_tokens=1024, max_slots=2, threads=1, gpus=gpus, cache_ram_bytes=1 << 27
        ),
        backend=BACKEND,
    )
    return LocalEngine(options, notify=lambda text: None)


GREEDY = Sampling(temperature=0.0)


def asked(text: str, tokens: int = 24, sampling: Sampling = GREEDY) -> GenerateRequest:
    return GenerateRequest(TextPrompt(text), sampling=sampling, max_tokens=tokens)


DIGITS = Grammar("regex", "[0-9]{3,9}")
REQUESTS = {
    "greedy": asked(LONG),
    "seeded": asked(LONG, sampling=Sampling(temperature=1.0, seed=3)),
    "penalised": asked("aaaa", sampling=Sampling(temperature=0.0, frequency_penalty=1.0)),
    "bound to a form": GenerateRequest(
        TextPrompt("x"), sampling=GREEDY, max_tokens=30, grammar=DIGITS
    ),
}


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str, str]:
    """Answers of one rank."""
    with closing(opened(folder, gpus=1)) as engine:
        return {name: ask(engine, request).text for name, request in REQUESTS.items()}


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LocalEngine]:
    with closing(opened(folder)) as two:
        yield two


@pytest.mark.parametrize("name", REQUESTS)
def test_two_processes_write_the_text_of_one(
    engine: LocalEngine, texts: dict[str, str], name: str
) -> None:
    assert ask(engine, REQUESTS[name]).text == texts[name]


def test_a_closed_stream_leaves_the_engine_usable(
    engine: LocalEngine, texts: dict[str, str]
) -> None:
    stream = engine.generate(asked("hello", tokens=600))
    for event in stream:
        if isinstance(event, Text):
            break
    stream.close()
    assert ask(engine, REQUESTS["greedy"]).text == texts["greedy"]


def rank_of(engine: LocalEngine) -> int:
    """The process of rank 1 of an engine that runs."""
    pid = engine.child_pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    [rank] = [
        child
        for child in map(int, children)
        if b"ranks.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return rank


def test_a_killed_rank_ends_the_engine_by_name_and_a_killed_engine_its_ranks(
    engine: LocalEngine, texts: dict[str, str]
) -> None:
    stream = engine.generate(asked("hello", tokens=900))
    for event in stream:
        if isinstance(event, Text):
            break
    os.kill(rank_of(engine), signal.SIGKILL)
    with pytest.raises(EngineDied, match=r"Rank 1 of 2 \(cpu\) was killed by signal 9"):
        list(stream)
    # The next request gets a new engine.
    assert ask(engine, REQUESTS["greedy"]).text == texts["greedy"]
    file = os.pidfd_open(rank_of(engine))
    os.kill(engine.child_pid or 0, signal.SIGKILL)
    # Readable once the process has ended.
    assert select.select([file], [], [], PATIENCE_S)[0]
    os.close(file)


def test_a_number_of_gpus_that_the_model_lacks_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="cannot be divided among 3 GPUs") as caught:
        ask(opened(folder, gpus=3), asked("hello"))
    assert "1, 2, 4" in caught.value.hint


class Loading:
    """Workers whose processes run a line of Python instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
        opening = "import sys; from multiprocessing.connection import Connection"
        code = f"{opening}; link = Connection(int(sys.argv[1])); {line}"
        monkeypatch.setattr(workers, "_COMMAND", (sys.executable, "-c", code))
        job = RankJob(0, 2, "cpu", None, None, None, tmp_path / "meeting", -1)  # type: ignore[arg-type]
        self.started = workers.started(job, ["cpu"])


def join(place: workers.Workers) -> None:
    place.join(torch.device("cpu"), 8, lambda done, total: True, host_blocks=False)


def test_a_rank_that_ends_while_it_loads_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loading = Loading(monkeypatch, tmp_path, "sys.exit(3)")
    named = pytest.raises(DeviceFault, match=r"Rank 1 of 2 \(cpu\) exited with status 3")
    with named, loading.started as place:
        join(place)


def test_the_error_of_a_rank_that_cannot_load_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failed = messages.RankFailed("DoesNotFit", "The GPU ran out of memory.", "Close something.")
    loading = Loading(monkeypatch, tmp_path, f"link.send_bytes({pickle.dumps(failed)!r})")
    raised = pytest.raises(DoesNotFit, match=r"Rank 1 of 2 .*ran out of memory")
    with raised as caught, loading.started as place:
        join(place)
    assert caught.value.hint == "Close something."
