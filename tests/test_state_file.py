"""Small JSON files that may be lost."""

import stat
from pathlib import Path

import msgspec
import pytest
from filelock import FileLock

from localchat.state_file import StateFile


class Seen(msgspec.Struct, frozen=True):
    names: tuple[str, ...] = ()


def seen(path: Path | None) -> StateFile[Seen]:
    return StateFile(path, Seen, Seen(("default",)))


def test_a_value_is_read_back_and_its_file_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "state" / "seen.json"
    seen(path).write(Seen(("a", "b")))
    assert seen(path).read() == Seen(("a", "b"))
    assert path.read_text() == '{\n  "names": [\n    "a",\n    "b"\n  ]\n}\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", "{", "[]", '{"names": 1}', "\udcff"])
def test_a_damaged_file_reads_as_the_default(tmp_path: Path, content: str) -> None:
    path = tmp_path / "seen.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    assert seen(path).read() == Seen(("default",))
    with pytest.raises(msgspec.DecodeError):
        seen(path).read_strictly()


def test_a_missing_file_reads_as_the_default(tmp_path: Path) -> None:
    assert seen(tmp_path / "none").read() == seen(tmp_path / "none").read_strictly()
    (tmp_path / "file").touch()
    below_a_file = seen(tmp_path / "file" / "none")
    assert below_a_file.read() == below_a_file.read_strictly() == Seen(("default",))
    assert seen(tmp_path).read() == Seen(("default",))
    with pytest.raises(OSError, match="directory"):
        seen(tmp_path).read_strictly()


def test_without_a_path_nothing_is_kept() -> None:
    file = seen(None)
    file.write(Seen(("a",)))
    assert not file.update(lambda value: value, 0)
    assert file.read() == file.read_strictly() == Seen(("default",))


def test_an_update_changes_what_is_there_and_gives_up_on_a_held_lock(tmp_path: Path) -> None:
    file = seen(tmp_path / "state" / "seen.json")
    assert file.update(lambda value: Seen((*value.names, "a")), 1)
    with FileLock(tmp_path / "state" / "seen.lock"):
        assert not file.update(lambda value: Seen(), 0.05)
    assert file.read() == Seen(("default", "a"))
