"""KV kept on the disk, over every backend: a conversation that goes on after a restart is read back."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Sampling, TextPrompt
from localchat.fit.load_options import LoadOptions
from tests.support.answers import ask, told_apart
from tests.support.greedy import NEARLY_GREEDY

TEXT = "abcdefghijklmnopqrstuvwxyz 0123456789.,;:!? " * 14


@contextmanager
def opened(backend: tuple[str, Path], folder: Path) -> Iterator[LocalEngine]:
    name, path = backend
    options = EngineOptions(
        load=LoadOptions(context_tokens=2048, threads=1, max_slots=2),
        model=path,
        backend=name,
        kv_folder=folder,
        kv_folder_bytes=1 << 30,
    )
    engine = LocalEngine(options, notify=lambda sentence: None)
    try:
        yield engine
    finally:
        engine.close()


def _wait_for_writes(folder: Path) -> None:
    """Until no more is written: an engine that is closed at once has little time on a busy machine."""
    before = 0
    for _ in range(30):
        time.sleep(1.0)
        with suppress(FileNotFoundError):  # a file is written under another name first
            size = sum(path.stat().st_size for path in folder.rglob("*"))
            if size == before > 0:
                return
            before = size


SAMPLINGS = (
    Sampling(temperature=NEARLY_GREEDY),
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=7),
)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["drawn", "greedy", "seeded"])
def test_a_text_goes_on_after_a_restart_as_in_the_run_that_stored_it(
    backend: tuple[str, Path], tmp_path: Path, sampling: Sampling
) -> None:
    exact = sampling is not SAMPLINGS[0]

    def request(text: str, salt: str = "") -> GenerateRequest:
        return GenerateRequest(
            TextPrompt(text), sampling=sampling, max_tokens=30, ignore_eos=True, owner="1",
            logprobs=2, salt=salt,
        )  # fmt: skip

    with opened(backend, tmp_path) as engine:
        first = ask(engine, request(TEXT))
        assert first.done.read_back_tokens == 0
        _wait_for_writes(tmp_path)
    with opened(backend, tmp_path) as engine:
        again = ask(engine, request(TEXT))
        other = ask(engine, request(TEXT, salt="b"))
    if exact:
        assert again.logprobs == first.logprobs
    else:
        assert again.done.read_back_tokens > again.done.usage.prompt_tokens - 80
        assert again.done.read_back_s > 0
        assert told_apart(first, again) < 0.1
    assert other.done.usage.cached_tokens == 0
