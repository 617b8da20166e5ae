"""KV that the disk keeps, through engine processes over the built-in guide: killed, damaged, refused, changed.

Whatever happens to the files, an answer has the text that it has without them.
"""

import os
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import localchat
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Sampling, TextPrompt
from localchat.fit.load_options import LoadOptions
from localchat.kv_store.entry import PART_SUFFIX, SUFFIX
from localchat.kv_store.store import KVStore
from localchat.measure.workload import prose
from localchat_llamacpp.library_source import VARIABLE, find_library
from tests.support.answers import Answer, ask

GUIDE = Path(localchat.__file__).with_name("guide") / "guide.gguf"
TEXTS = [prose(265, f"kept {number}") for number in range(10)]
LIMIT_BYTES = 8_000_000
KILLS = 8
STARTS_WITH_FLIPS, HEAD_BYTES = 5, 1200
PATIENCE_S = 30.0

References = Callable[[str], str]


@contextmanager
def engine(
    folder: Path | None, model: Path = GUIDE, said: list[str] | None = None, **load: Any
) -> Iterator[LocalEngine]:
    """An engine process whose disk tier has this folder."""
    options = EngineOptions(
        model,
        load=LoadOptions(**{"context_tokens": 2048, "threads": 1, "max_slots": 2, **load}),
        name="guide",
        kv_folder=folder,
        kv_folder_bytes=LIMIT_BYTES,
    )
    notices = [] if said is None else said
    opened = LocalEngine(options, notify=notices.append)
    try:
        yield opened
    finally:
        opened.close()


def answered(opened: LocalEngine, text: str, seed: int | None = 7) -> Answer:
    """The answer to a text of a conversation that may be kept."""
    sampling = Sampling(temperature=1.0, seed=seed)
    request = GenerateRequest(
        TextPrompt(text), sampling=sampling, max_tokens=8, ignore_eos=True, owner="conversation"
    )
    return ask(opened, request)


@pytest.fixture(scope="module")
def expected() -> Iterator[References]:
    """expected(text) -> its answer by an engine that keeps nothing."""
    known: dict[str, str] = {}
    with engine(None) as opened:

        def reference(text: str) -> str:
            if text not in known:
                known[text] = answered(opened, text).text
            return known[text]

        yield reference


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, expected: References) -> Path:
    """A folder with the KV of some texts. Not to be changed."""
    folder = tmp_path_factory.mktemp("kept") / "kv"
    with engine(folder) as opened:
        for text in TEXTS[:4]:
            assert answered(opened, text).text == expected(text)
        wait_until(lambda: len(entries(folder)) >= 8)
    return folder


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{SUFFIX}"))


def parts(folder: Path) -> list[Path]:
    return sorted(folder.rglob(f"*{PART_SUFFIX}"))


def told(said: list[str]) -> list[str]:
    """Notices that the disk keeps nothing more."""
    return [sentence for sentence in said if "not kept ready on the disk" in sentence]


def wait_until(done: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_engines_that_are_killed_while_they_write_leave_only_what_is_right(
    tmp_path: Path, expected: References
) -> None:
    folder, read_back = tmp_path / "kv", 0
    for run in range(KILLS):
        with engine(folder) as opened:
            # Behind a patient run the same texts again: what it wrote is one of them.
            asked = run - 1 if run == 4 else run
            for text in (TEXTS[asked % 3], TEXTS[asked]):
                answer = answered(opened, text)
                assert answer.text == expected(text)
                read_back += answer.done.read_back_tokens
            before = set(entries(folder))
            # At another moment each time: in a part, between two files, after the last one. Now and then after
            # some were written, however busy the machine is.
            patient = run % 4 == 3
            end_s = time.monotonic() + (30 if patient else 0.3 + 0.05 * run)
            while time.monotonic() < end_s and (patient or not parts(folder)):
                if len(set(entries(folder)) - before) > run % 3:
                    break
                time.sleep(0.001)
            assert opened.child_pid is not None
            os.kill(opened.child_pid, 9)
    assert read_back > 0
    store = KVStore(folder, LIMIT_BYTES)
    assert sum(file.size_bytes for file in store.files()) <= LIMIT_BYTES
    for part in parts(folder):
        os.utime(part, (1, 1))
    assert list(store.files()) and not parts(folder)


def test_flipped_bits_change_no_text(tmp_path: Path, kept: Path, expected: References) -> None:
    draw = random.Random(3)
    read_back, missed = 0, 0
    for start in range(STARTS_WITH_FLIPS):
        folder = tmp_path / f"kv{start}"
        shutil.copytree(kept, folder)
        for file in entries(folder):
            content = bytearray(file.read_bytes())
            most = HEAD_BYTES if draw.random() < 0.3 else len(content)
            # Several in some files and none in others.
            for _ in range(draw.choice([0, 1, 1, 8])):
                content[draw.randrange(most)] ^= 1 << draw.randrange(8)
            file.write_bytes(content)
        with engine(folder) as opened:
            for text in TEXTS[:4]:
                answer = answered(opened, text)
                assert answer.text == expected(text)
                read_back += answer.done.read_back_tokens
                missed += answer.done.read_back_tokens == 0
    assert read_back > 0 and missed > 0


def test_a_disk_that_takes_no_more_costs_one_notice(tmp_path: Path, expected: References) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    said: list[str] = []
    folder = tmp_path / "kv"
    try:
        with engine(folder, said=said) as opened:
            for text in TEXTS[:2]:
                assert answered(opened, text).text == expected(text)
                wait_until(lambda: told(said))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(told(said)) == 1
    assert not entries(folder) and not parts(folder)


def test_without_a_folder_that_can_be_made_everything_is_answered(
    tmp_path: Path, expected: References
) -> None:
    place = tmp_path / "file"
    place.write_text("no folder")
    said: list[str] = []
    with engine(place / "kv", said=said) as opened:
        assert answered(opened, TEXTS[0]).text == expected(TEXTS[0])
        wait_until(lambda: told(said))
        assert answered(opened, TEXTS[1]).text == expected(TEXTS[1])
    assert place.read_text() == "no folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_folder_that_is_read_only_is_still_read(kept: Path, expected: References) -> None:
    folders = [kept, *(one for one in kept.iterdir() if one.is_dir())]
    for one in folders:
        one.chmod(0o500)
    try:
        with engine(kept) as opened:
            answer = answered(opened, TEXTS[0])
            assert answer.text == expected(TEXTS[0]) and answer.done.read_back_tokens
            assert answered(opened, TEXTS[9]).text == expected(TEXTS[9])
    finally:
        for one in folders:
            one.chmod(0o700)


def test_two_programs_keep_the_same_texts_at_once(tmp_path: Path, expected: References) -> None:
    folder = tmp_path / "kv"
    wanted = [expected(text) for text in TEXTS[:6]]
    meet = threading.Barrier(2)

    def use() -> list[str]:
        with engine(folder) as opened:
            answered(opened, "warm")
            meet.wait(PATIENCE_S)
            texts = [answered(opened, text).text for text in TEXTS[:6]]
            wait_until(lambda: entries(folder))
            return texts

    with ThreadPoolExecutor(2) as pool:
        assert all(one.result() == wanted for one in [pool.submit(use), pool.submit(use)])
    with engine(folder) as opened:
        answers = [answered(opened, text) for text in TEXTS[:6]]
    assert [answer.text for answer in answers] == wanted
    assert any(answer.done.read_back_tokens for answer in answers)
    assert not parts(folder)


@pytest.mark.parametrize("seed", [7, None])
def test_what_was_kept_is_read_back_after_a_start(
    kept: Path, expected: References, seed: int | None
) -> None:
    with engine(kept) as opened:
        answer = answered(opened, TEXTS[0], seed)
    assert answer.done.read_back_tokens
    assert seed is None or answer.text == expected(TEXTS[0])


def test_a_changed_model_file_reads_nothing(tmp_path: Path, expected: References) -> None:
    model, folder = tmp_path / "model.gguf", tmp_path / "kv"
    shutil.copyfile(GUIDE, model)
    with engine(folder, model) as opened:
        answered(opened, TEXTS[0])
        wait_until(lambda: len(entries(folder)) >= 2)
    with engine(folder, model) as opened:
        assert answered(opened, TEXTS[0]).done.read_back_tokens
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    with engine(folder, model) as opened:
        assert not answered(opened, TEXTS[0]).done.read_back_tokens


def test_another_kv_type_reads_nothing(kept: Path) -> None:
    with engine(kept, kv_type="q8_0") as opened:
        assert not answered(opened, TEXTS[0]).done.read_back_tokens


def test_another_build_reads_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_library().library
    others = [
        name for name in ("xllamacpp", "llama-cpp-python") if library and name != library.name
    ]
    found = [name for name in others if find_library({VARIABLE: name}).library]
    if not found:
        pytest.skip("there is one library of llama.cpp here")
    monkeypatch.setenv(VARIABLE, found[0])
    with engine(kept) as opened:
        assert not answered(opened, TEXTS[0]).done.read_back_tokens
