"""The verdict on a new library: right and faster, or not taken."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from localchat_llamacpp.library_source import VARIABLE, find_library
from localchat_llamacpp.rebuild.comparison import (
    MAX_ROUNDS,
    ROUNDS,
    TrialFailed,
    Verdict,
    compare,
    try_library,
)
from localchat_llamacpp.rebuild.trial import TrialRequest, TrialResult

OLD, NEW = Path("old"), Path("new")
REQUEST = TrialRequest(threads=1)
PLAIN = TrialResult((5, 6, 7), (2.0, 1.0, 3.0), 100.0, 20.0)


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

    return compare(OLD, NEW, request, lambda done, total: None, try_), tried


def speed(prefill: float, decode: float) -> TrialResult:
    return msgspec.structs.replace(PLAIN, prefill_tokens_per_s=prefill, decode_tokens_per_s=decode)


@pytest.mark.parametrize(
    ("prefill", "decode", "better"),
    [
        (150.0, 20.0, True),
        (100.0, 25.0, True),
        (150.0, 19.5, True),
        (103.0, 20.5, False),
        (90.0, 19.0, False),
        (150.0, 15.0, False),
    ],
)
def test_a_build_is_taken_if_it_is_faster_and_slower_in_nothing(
    prefill: float, decode: float, better: bool
) -> None:
    verdict, _ = judged(speed(prefill, decode))
    assert verdict.better == better
    assert f"100 to {prefill:.0f} tok/s" in verdict.sentence


def test_another_text_is_never_taken() -> None:
    wrong = msgspec.structs.replace(speed(300.0, 60.0), tokens=(5, 9, 7))
    verdict, _ = judged(wrong)
    assert not verdict.better and "token 2 of 3" in verdict.sentence
    short = msgspec.structs.replace(speed(300.0, 60.0), tokens=(5, 6))
    assert not judged(short)[0].better


def test_another_token_where_two_are_within_rounding_is_right() -> None:
    tied = msgspec.structs.replace(PLAIN, margins=(2.0, 0.001, 3.0))
    other = msgspec.structs.replace(speed(150.0, 20.0), tokens=(5, 9, 1))
    assert judged(other, tied)[0].better


def test_a_build_that_crashes_in_its_trial_is_not_taken() -> None:
    verdict, _ = judged("crashed (SIGILL)")
    assert verdict == Verdict(False, "it crashed (SIGILL)")


def test_trials_of_both_alternate() -> None:
    _, tried = judged(speed(150.0, 20.0))
    order = [path for path, _ in tried]
    order.remove(OLD)  # the first look at how the library in use works
    assert order == [NEW, OLD] * (len(order) // 2) and len(order) >= 6


def test_the_library_in_use_is_tried_as_it_runs_in_safe_mode_and_on_the_cpu() -> None:
    verdict, tried = judged(
        speed(150.0, 20.0), "crashed (SIGSEGV)", msgspec.structs.replace(REQUEST, gpu=True)
    )
    assert verdict.better
    timed = [asked for path, asked in tried if path == OLD][1:]
    assert all(asked.safe_mode and not asked.gpu for asked in timed)
    assert all(asked.gpu for path, asked in tried if path == NEW)


def test_where_there_is_no_library_one_that_works_is_taken() -> None:
    verdict = compare(None, NEW, REQUEST, lambda done, total: None, lambda path, asked: PLAIN)
    assert verdict.better


def test_progress_counts_every_trial() -> None:
    seen: list[tuple[int, int]] = []
    report: Callable[[int, int], None] = lambda done, total: seen.append((done, total))  # noqa: E731
    compare(OLD, NEW, REQUEST, report, lambda path, asked: PLAIN)
    assert [done for done, _ in seen] == list(range(2 * ROUNDS))
    assert all(done < total for done, total in seen)


def test_on_a_busy_machine_trials_go_on_until_the_best_of_each_agree() -> None:
    """The first rounds of the new library are disturbed: on their word it would be slower."""
    disturbed = iter([50.0, 30.0, 70.0, 150.0])
    tried: list[Path] = []

    def try_(path: Path, asked: TrialRequest) -> TrialResult:
        tried.append(path)
        return speed(next(disturbed, 149.0), 20.0) if path == NEW else PLAIN

    assert compare(OLD, NEW, REQUEST, lambda done, total: None, try_).better
    assert tried.count(NEW) == 5
    endless = iter(range(100, 10_000, 10))
    tried.clear()

    def restless(path: Path, asked: TrialRequest) -> TrialResult:
        tried.append(path)
        return speed(float(next(endless)), 20.0)

    compare(OLD, NEW, REQUEST, lambda done, total: None, restless)
    assert tried.count(NEW) == MAX_ROUNDS


def test_a_library_is_tried_by_the_program_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_library().library
    assert library is not None
    # In safe mode, because a build that GCC made for a CPU with AMX may crash without.
    found = try_library(library.file, msgspec.structs.replace(REQUEST, safe_mode=True))
    assert len(found.tokens) == len(found.margins) > 20
    assert min(found.margins) >= 0 < found.prefill_tokens_per_s
    assert found.decode_tokens_per_s > 0


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
