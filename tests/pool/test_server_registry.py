"""How a server is found: a file of its own that nobody else reads, and no stale one is believed."""

import os
import stat
from pathlib import Path

import msgspec
import pytest

from localchat.config.paths import Paths
from localchat.pool.server_registry import Registration, new_token, register, registered


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(*(tmp_path / name for name in ("s.toml", "data", "state", "cache", "models")))


def folder(paths: Paths) -> Path:
    return paths.state_dir / "servers"


def other(paths: Paths, pid: int, **changes: object) -> None:
    mine = register(paths, "http://127.0.0.1:1", "t", 5.0)
    about = msgspec.structs.replace(mine.about, pid=pid, **changes)
    mine.withdraw()
    (folder(paths) / f"{pid}.json").write_bytes(msgspec.json.encode(about))


def test_registered_server_is_found_and_its_file_is_private(paths: Paths) -> None:
    assert registered(paths) == ()
    known = register(paths, "http://127.0.0.1:8114/", "secret", 7.5)
    (found,) = registered(paths)
    assert found == known.about
    assert (found.url, found.token, found.pid) == ("http://127.0.0.1:8114", "secret", os.getpid())
    (file,) = folder(paths).iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder(paths).stat().st_mode) == 0o700
    known.withdraw()
    known.withdraw()
    assert registered(paths) == ()


def test_registration_is_private_under_any_umask(paths: Paths) -> None:
    before = os.umask(0)
    try:
        register(paths, "http://127.0.0.1:1", "t", 0.0)
    finally:
        os.umask(before)
    (file,) = folder(paths).iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_file_of_a_process_that_is_gone_is_removed(paths: Paths) -> None:
    other(paths, 1 << 22)
    assert registered(paths, alive=lambda pid: False) == ()
    assert list(folder(paths).iterdir()) == []


def test_newest_server_comes_first(paths: Paths) -> None:
    for pid, started_s in ((10, 1.0), (11, 3.0), (12, 2.0)):
        other(paths, pid, started_s=started_s)
    assert [about.pid for about in registered(paths, alive=lambda pid: True)] == [11, 12, 10]


def test_server_of_another_version_is_left_alone(paths: Paths) -> None:
    other(paths, os.getpid(), version="0.0.0-other")
    assert registered(paths) == ()
    assert len(list(folder(paths).iterdir())) == 1


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"pid": "x"}', "[" * 5000])
def test_file_that_is_none_of_ours_is_ignored(paths: Paths, text: str) -> None:
    folder(paths).mkdir(parents=True)
    (folder(paths) / "7.json").write_text(text)
    assert registered(paths, alive=lambda pid: True) == ()


def test_crash_between_two_writes_leaves_nothing_in_the_way(paths: Paths) -> None:
    folder(paths).mkdir(parents=True)
    (folder(paths) / f".{os.getpid()}.new").write_text("half")
    register(paths, "http://127.0.0.1:1", "t", 0.0)
    assert isinstance(registered(paths)[0], Registration)


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(50)}
    assert len(tokens) == 50 and min(map(len, tokens)) >= 40
