"""The verdict on a new library: right, or not taken."""

from pathlib import Path

import msgspec
import pytest

from localchat_llamacpp.library_source import VARIABLE, find_library
from localchat_llamacpp.rebuild.comparison import (
    TrialFailed,
    Verdict,
    compare,
    try_library,
)
from localchat_llamacpp.rebuild.trial import TrialRequest, TrialResult

OLD, NEW = Path("old"), Path("new")
REQUEST = TrialRequest(threads=1)
PLAIN = TrialResult((5, 6, 7), (2.0, 1.0, 3.0))


def judged(
    new: TrialResult | str,
    old: TrialResult | str = PLAIN,
    request: TrialRequest = REQUEST,
) -> tuple[Verdict, list[tuple[Path, TrialRequest]]]:
    """The verdict on these results (a text: the failure), and the trials that were made."""
    tried: list[tuple[Path, TrialRequest]] = []

    def try_(path: Path, asked: TrialRequest) -> TrialResult:
        tried.append((path, asked))
        result = new if path == NEW else old
        if isinstance(result, str) and not (path == OLD and asked.safe_mode):
            raise TrialFailed(result)
        return PLAIN if isinstance(result, str) else result

    return compare(OLD, NEW, request, try_), tried


def test_a_build_that_writes_the_same_text_is_taken() -> None:
    verdict, tried = judged(PLAIN)
    assert verdict.accepted and "same text" in verdict.sentence
    assert [path for path, _ in tried] == [NEW, OLD]


def test_another_text_is_never_taken() -> None:
    verdict, _ = judged(msgspec.structs.replace(PLAIN, tokens=(5, 9, 7)))
    assert not verdict.accepted and "token 2 of 3" in verdict.sentence
    assert not judged(msgspec.structs.replace(PLAIN, tokens=(5, 6)))[0].accepted


def test_another_token_where_two_are_within_rounding_is_right() -> None:
    tied = msgspec.structs.replace(PLAIN, margins=(2.0, 0.001, 3.0))
    other = msgspec.structs.replace(PLAIN, tokens=(5, 9, 1))
    assert judged(other, tied)[0].accepted


def test_a_build_that_crashes_in_its_trial_is_not_taken() -> None:
    verdict, _ = judged("crashed (SIGILL)")
    assert verdict == Verdict(False, "it crashed (SIGILL)")


def test_the_library_in_use_is_tried_as_it_runs_in_safe_mode_and_on_the_cpu() -> None:
    on_gpu = msgspec.structs.replace(REQUEST, gpu=True)
    verdict, tried = judged(PLAIN, "crashed (SIGSEGV)", on_gpu)
    assert verdict.accepted
    plain = msgspec.structs.replace(on_gpu, gpu=False)
    safe = msgspec.structs.replace(plain, safe_mode=True)
    assert tried == [(NEW, on_gpu), (OLD, plain), (OLD, safe)]


def test_where_the_library_in_use_does_not_work_one_that_works_is_taken() -> None:
    def try_(path: Path, asked: TrialRequest) -> TrialResult:
        if path == OLD:
            raise TrialFailed("crashed (SIGSEGV)")
        return PLAIN

    verdict = compare(OLD, NEW, REQUEST, try_)
    assert verdict.accepted and "in use crashed (SIGSEGV)" in verdict.sentence


def test_where_there_is_no_library_one_that_works_is_taken() -> None:
    assert compare(None, NEW, REQUEST, lambda path, asked: PLAIN).accepted


def test_a_library_is_tried_by_the_program_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_library().library
    assert library is not None
    # In safe mode, because a build that GCC made for a CPU with AMX may crash without.
    found = try_library(library.file, msgspec.structs.replace(REQUEST, safe_mode=True))
    assert len(found.tokens) == len(found.margins) > 20
    assert min(found.margins) >= 0


def test_a_library_for_a_gpu_must_find_one() -> None:
    library = find_library().library
    assert library is not None
    with pytest.raises(TrialFailed, match="finds no GPU"):
        try_library(library.file, msgspec.structs.replace(REQUEST, gpu=True))


def test_a_file_that_is_no_library_fails_in_its_trial(tmp_path: Path) -> None:
    file = tmp_path / "libllama.so"
    file.write_text("no library")
    with pytest.raises(TrialFailed, match="not a shared library"):
        try_library(file, REQUEST)


def test_a_trial_that_dies_names_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        f"if os.environ.get('{VARIABLE}') == 'dies':\n"
        "    os.kill(os.getpid(), signal.SIGILL)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TrialFailed, match=r"crashed \(SIGILL\)"):
        try_library(Path("dies"), REQUEST)
