"""Backends are found by entry point, and a broken one does not hide the others."""

import sys
from pathlib import Path

import pytest

from localchat.backend_api.registry import choose_for_file, find_backends
from localchat.errors import LocalchatError, UsageError


def declare(folder: Path, *points: str) -> None:
    """Put a distribution with these entry points into the folder."""
    about = folder / "stranger-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
    (about / "entry_points.txt").write_text("\n".join(("[localchat.backends]", *points)) + "\n")


def test_a_strangers_backend_enters_as_ours_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger_backend.py").write_text("class Backend:\n    name = 'stranger'\n")
    declare(tmp_path, "stranger = stranger_backend:Backend", "broken = stranger_backend:Missing")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_backends()
    assert found["stranger"].name == "stranger"
    assert {"llamacpp", "broken"} <= set(found)
    del sys.modules["stranger_backend"]


def test_a_backend_that_cannot_be_imported_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(tmp_path, "broken = no_such_module_here:Backend")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = find_backends()["broken"]
    available = broken.available()
    assert not available.ok
    assert "no_such_module_here" in available.reason
    assert (broken.build_key(), broken.remedies()) == ("", ())
    assert not broken.accepts(tmp_path / "m.gguf")
    with pytest.raises(LocalchatError, match="no_such_module_here"):
        broken.open(tmp_path / "m.gguf", print)


def test_the_backend_for_a_file_is_one_that_accepts_it(tmp_path: Path) -> None:
    assert choose_for_file(tmp_path / "m.gguf").backend.name == "llamacpp"
    assert choose_for_file(tmp_path / "m.bin", "llamacpp").backend.name == "llamacpp"
    with pytest.raises(UsageError, match="'nonsense'"):
        choose_for_file(tmp_path / "m.gguf", "nonsense")
    with pytest.raises(LocalchatError, match="not a format"):
        choose_for_file(tmp_path / "m.bin")
