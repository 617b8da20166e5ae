"""KV kept on the disk, over every backend: a conversation that goes on after a restart is read back."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


def test_texts_go_on_after_a_restart_as_in_the_run_that_stored_them(
    backend: tuple[str, Path], tmp_path: Path
) -> None:
    """All samplings share both engines. The start of an engine takes longer than their texts."""

    def request(number: int, salt: str = "") -> GenerateRequest:
        return GenerateRequest(
            TextPrompt(TEXT), sampling=SAMPLINGS[number], max_tokens=30, ignore_eos=True, owner="1",
            logprobs=2, salt=salt or str(number),
        )  # fmt: skip

    with opened(backend, tmp_path) as engine:
        first = [ask(engine, request(number)) for number in range(len(SAMPLINGS))]
        assert [answer.done.read_back_tokens for answer in first] == [0] * len(SAMPLINGS)
        _wait_for_writes(tmp_path)
    with opened(backend, tmp_path) as engine:
        again = [ask(engine, request(number)) for number in range(len(SAMPLINGS))]
        other = ask(engine, request(0, salt="other"))
    drawn, *exact = zip(first, again, strict=True)
    for stored, restarted in exact:
        assert restarted.logprobs == stored.logprobs
    stored, restarted = drawn
    assert restarted.done.read_back_tokens > restarted.done.usage.prompt_tokens - 80
    assert restarted.done.read_back_s > 0
    assert told_apart(stored, restarted) < 0.1
    assert other.done.usage.cached_tokens == 0
