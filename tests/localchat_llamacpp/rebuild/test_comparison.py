"""The verdict on a new library: right, or not taken."""

from pathlib import Path

import pytest

from localchat_llamacpp.library_source import VARIABLE, find_library
from localchat_llamacpp.rebuild.comparison import TrialFailed, Verdict, compare, try_library

OLD, NEW = Path("old"), Path("new")
ANSWER = "The KV cache keeps the keys and values of all earlier tokens, for every layer."


def judged(new: str, old: str = ANSWER, *, on_gpu: bool = False) -> Verdict:
    """The verdict on these answers. A text that starts with `crashed` is a failure."""

    def try_(path: Path, gpu: bool) -> str:
        assert gpu == (on_gpu and path == NEW), "the library in use computes on the CPU"
        answer = new if path == NEW else old
        if answer.startswith("crashed"):
            raise TrialFailed(answer)
        return answer

    return compare(OLD, NEW, on_gpu, try_)


def test_a_build_that_writes_the_same_text_is_taken() -> None:
    verdict = judged(ANSWER, on_gpu=True)
    assert verdict.accepted and "same text" in verdict.sentence


def test_another_text_is_never_taken() -> None:
    verdict = judged("The KV the the the")
    assert not verdict.accepted and "another text" in verdict.sentence


def test_another_word_at_the_end_is_within_rounding() -> None:
    assert judged(ANSWER.replace("layer", "block")).accepted


def test_a_build_that_crashes_in_its_trial_is_not_taken() -> None:
    assert judged("crashed (SIGILL)") == Verdict(False, "it crashed (SIGILL)")


def test_where_the_library_in_use_does_not_work_one_that_works_is_taken() -> None:
    verdict = judged(ANSWER, "crashed (SIGSEGV)")
    assert verdict.accepted and "in use crashed (SIGSEGV)" in verdict.sentence


def test_where_there_is_no_library_one_that_works_is_taken() -> None:
    assert compare(None, NEW, False, lambda path, gpu: ANSWER).accepted


def test_a_library_is_tried_by_the_program_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_library().library
    assert library is not None
    monkeypatch.setenv("LOCALCHAT_MODEL", "nothing")
    assert "keys and values" in try_library(library.file, False)
    with pytest.raises(TrialFailed, match="a GPU is required"):
        try_library(library.file, True)


def test_a_file_that_is_no_library_fails_in_its_trial(tmp_path: Path) -> None:
    file = tmp_path / "libllama.so"
    file.write_text("no library")
    with pytest.raises(TrialFailed, match="not a shared library"):
        try_library(file, False)


def test_a_program_that_dies_without_a_word_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        f"if os.environ.get('{VARIABLE}') == 'dies':\n"
        "    os.kill(os.getpid(), signal.SIGILL)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TrialFailed, match="status -4"):
        try_library(Path("dies"), False)


def test_a_library_that_answers_in_safe_mode_only_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        f"if os.environ.get('{VARIABLE}') == 'crashes':\n"
        "    state = pathlib.Path(os.environ['LOCALCHAT_DATA_DIR']) / 'state'\n"
        "    state.mkdir()\n"
        "    (state / 'safe-builds.json').write_text('{}')\n"
        "    os.write(1, b'The KV cache')\n"
        "    os._exit(0)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TrialFailed, match="works in safe mode only"):
        try_library(Path("crashes"), False)
