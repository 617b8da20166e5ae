"""A rebuild from begin to end with a fake pip: what is taken, and what stays as it was."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from localchat.backend_api.interface import RebuildOutcome, RebuildProgress
from localchat.errors import LocalchatError
from localchat_llamacpp.library_source import (
    VARIABLE,
    LibraryFile,
    find_library,
    native_build_folder,
)
from localchat_llamacpp.rebuild import rebuilder
from localchat_llamacpp.rebuild.builder import build
from localchat_llamacpp.rebuild.comparison import Verdict
from localchat_llamacpp.rebuild.rebuilder import LlamaCppRebuilder
from localchat_llamacpp.rebuild.store import LOG, BuildStore
from tests.support.paths import ROOT

RIGHT, WRONG = Verdict(True, "the same text"), Verdict(False, "it crashed (SIGILL)")
Rebuild = Callable[..., RebuildOutcome]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the build, in a home of its own; compilers are said to be there."""
    monkeypatch.setenv("LOCALCHAT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(rebuilder, "missing_tools", lambda kind: "")
    return native_build_folder(os.environ)


def rebuilt(verdict: Verdict = RIGHT, **how: object) -> RebuildOutcome:
    """Rebuild with a pip that does what `how` says (fake_pip.py), and this verdict on its library."""
    installer = (sys.executable, "-m", "tests.support.fake_pip", json.dumps(how))
    made = LlamaCppRebuilder(
        BuildStore(native_build_folder(os.environ)),
        partial(build, installer=installer),
        lambda old, new, request: verdict,
    )
    return made.rebuild("cpu", lambda progress: None)


def in_use() -> LibraryFile | None:
    found = find_library(os.environ).library
    return found if found is not None and found.source == "native" else None


def text_in_use() -> str:
    library = in_use()
    return library.file.read_text() if library else ""


def left(folder: Path) -> set[str]:
    """Everything in the folder that only a running build may have."""
    kept = {LOG, "build.json", "build.lock"}
    return {path.name for path in folder.iterdir() if path.name not in kept}


def test_a_build_is_used_from_then_on_with_all_its_libraries(folder: Path) -> None:
    assert in_use() is None
    outcome = rebuilt(library="first")
    assert outcome == RebuildOutcome(installed=True, sentence=RIGHT.sentence)
    library = in_use()
    assert library is not None and library.version == "0.3.36 for cpu"
    assert library.file.read_text() == "first"
    assert library.file.with_name("libggml.so").read_text() == "ggml"


def test_a_newer_build_replaces_the_one_before_and_leaves_nothing_of_it(folder: Path) -> None:
    rebuilt(library="first")
    before = left(folder)
    rebuilt(library="second")
    assert text_in_use() == "second"
    assert len(left(folder)) == 1 and left(folder) != before


@pytest.mark.parametrize("first", [None, "first"])
def test_a_build_that_fails_or_is_wrong_changes_nothing(folder: Path, first: str | None) -> None:
    if first:
        rebuilt(library=first)
    outcome = rebuilt(WRONG, library="wrong")
    assert outcome == RebuildOutcome(installed=False, sentence=WRONG.sentence)
    with pytest.raises(LocalchatError, match="could not be built: error: no cookie"):
        rebuilt(lines=["error: no cookie"], status=2)
    assert text_in_use() == (first or "")
    assert len(left(folder)) == bool(first)


def test_an_interrupt_in_the_trial_changes_nothing(folder: Path) -> None:
    rebuilt(library="first")

    def interrupted(*_: object) -> Verdict:
        raise KeyboardInterrupt

    installer = (sys.executable, "-m", "tests.support.fake_pip", json.dumps({"library": "second"}))
    made = LlamaCppRebuilder(BuildStore(folder), partial(build, installer=installer), interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.rebuild("cpu", lambda progress: None)
    assert text_in_use() == "first" and len(left(folder)) == 1


def test_a_build_is_taken_back(folder: Path) -> None:
    made = LlamaCppRebuilder(BuildStore(folder))
    assert not made.undo()
    rebuilt(library="first")
    assert made.undo()
    assert in_use() is None and not left(folder)
    assert not made.undo()


_KILLED = """
import json, os, sys
from functools import partial
from pathlib import Path
from localchat_llamacpp.rebuild import builder, rebuilder
from localchat_llamacpp.rebuild.comparison import Verdict
from localchat_llamacpp.rebuild.store import BuildStore

def die(*_):
    os.kill(os.getpid(), 9)

rebuilder.missing_tools = lambda kind: ""
moment, how = sys.argv[1:]
import localchat_llamacpp.rebuild.store as store
if moment == "before the record":
    store.write_text = die
if moment == "after the record":
    BuildStore._clean = lambda self: die() if (self.folder / "build.json").exists() and any(
        one.name.startswith("work-") for one in self.folder.iterdir()) else None
installer = (sys.executable, "-m", "tests.support.fake_pip", how)
verdict = die if moment == "in the trial" else lambda *_: Verdict(True, "right")
rebuilder.LlamaCppRebuilder(
    None, partial(builder.build, installer=installer), verdict
).rebuild("cpu", lambda progress: None)
"""


@pytest.mark.parametrize(
    ("moment", "text"),
    [("in the trial", "first"), ("before the record", "first"), ("after the record", "second")],
)
def test_a_kill_at_any_moment_leaves_one_whole_build(folder: Path, moment: str, text: str) -> None:
    rebuilt(library="first")
    script = json.dumps({"library": "second"})
    done = subprocess.run([sys.executable, "-c", _KILLED, moment, script], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert text_in_use() == text
    library = in_use()
    assert library is not None and library.file.with_name("libggml.so").exists()
    rebuilt(WRONG, library="wrong")  # the next run clears away what was left
    assert text_in_use() == text and len(left(folder)) == 1


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_kill_in_the_build_leaves_the_build_before(folder: Path, tmp_path: Path) -> None:
    rebuilt(library="first")
    note = tmp_path / "child"
    script = json.dumps({"library": "second", "hang": str(note)})
    process = subprocess.Popen([sys.executable, "-c", _KILLED, "never", script], cwd=ROOT)
    while not note.exists() or not note.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    with pytest.raises(LocalchatError, match="another `localchat doctor --rebuild` is running"):
        rebuilt(library="third")
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while _runs(int(note.read_text())):
        assert time.monotonic() < deadline, "a child of the build outlives the program"
        time.sleep(0.01)
    assert text_in_use() == "first"
    rebuilt(WRONG, library="wrong")
    assert text_in_use() == "first" and len(left(folder)) == 1


def test_without_a_compiler_nothing_begins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rebuilder, "missing_tools", lambda kind: "It needs a C++ compiler: get one."
    )
    with pytest.raises(LocalchatError) as refused:
        rebuilt(library="first")
    assert refused.value.hint == "It needs a C++ compiler: get one."
    assert not folder.exists()


def test_a_library_that_the_user_names_is_no_reason_to_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "xllamacpp")
    with pytest.raises(LocalchatError, match=VARIABLE):
        rebuilt(library="first")


def test_amx_is_left_out_where_gcc_compiles_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuilder, "has_amx", lambda: True)
    for gcc in (True, False):
        monkeypatch.setattr(rebuilder, "builds_with_gcc", lambda found=gcc: found)
        rebuilt(library="x")
        told = json.loads((folder / LOG).read_text().splitlines()[0])
        assert ("-U__AMX_INT8__" in told["cmake"]) == gcc


def test_the_trial_compares_with_the_library_in_use_and_tells_its_progress(folder: Path) -> None:
    before = find_library(os.environ).library
    assert before is not None
    seen: list[object] = []

    def compared(old: Path | None, new: Path, request: object) -> Verdict:
        seen.extend((old, new.read_text()))
        return WRONG

    installer = (sys.executable, "-m", "tests.support.fake_pip", json.dumps({"library": "x"}))
    steps: list[RebuildProgress] = []
    LlamaCppRebuilder(BuildStore(folder), partial(build, installer=installer), compared).rebuild(
        "cpu", steps.append
    )
    assert seen == [before.file, "x"]
    assert steps[-1] == RebuildProgress("trying it")
