"""Writes of tools are taken back byte by byte."""

from pathlib import Path

import pytest

from localchat.tools.journal import Journal
from localchat.tools.root import FileContent, Root
from localchat.tools.tool import ToolError

Snapshot = dict[str, tuple[bytes, int]]


def snapshot(folder: Path) -> Snapshot:
    paths = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): (
            path.read_bytes() if path.is_file() else b"",
            path.stat().st_mode,
        )
        for path in paths
    }


def write(journal: Journal, root: Root, name: str, data: bytes, mode: int = 0o644) -> None:
    journal.write(root, name, FileContent(data, mode), root.read(name))


def test_writes_of_a_branch_are_undone_newest_first_also_by_a_later_process(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"\xff\x00first")
    (folder / "a.txt").chmod(0o751)
    before = snapshot(folder)
    root = Root(folder)
    journal = Journal(tmp_path / "writes")
    journal.begin("talk", "n1")
    write(journal, root, "a.txt", b"second", 0o600)
    write(journal, root, "new/deep/b.txt", b"made")
    between = snapshot(folder)
    journal.begin("talk", "n2")
    write(journal, root, "a.txt", b"third")
    later = Journal(tmp_path / "writes")
    later.begin("talk")
    report = later.undo({"n2"})
    assert report.restored == (str(folder / "a.txt"),)
    assert snapshot(folder) == between
    assert later.undo({"n1", "n2"}).changed == ()
    assert snapshot(folder) == before
    assert not list((tmp_path / "writes" / "talk").iterdir())


def test_a_file_that_changed_since_is_left_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("1")
    (folder / "b.txt").write_text("1")
    root = Root(folder)
    journal = Journal(None)
    journal.begin("talk", "n1")
    for name in ("a.txt", "b.txt"):
        write(journal, root, name, b"2")
        write(journal, root, name, b"3")
    (folder / "a.txt").write_text("mine")
    report = journal.undo({"n1"})
    assert report.changed == (str(folder / "a.txt"),)
    assert report.restored == (str(folder / "b.txt"),)
    assert (folder / "a.txt").read_text() == "mine"
    assert (folder / "b.txt").read_text() == "1"
    assert report.sentence(folder).endswith("left as it is: a.txt")


def test_a_write_that_fails_leaves_no_record_and_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "file").write_text("x")
    root = Root(folder)
    journal = Journal(tmp_path / "writes")
    journal.begin("talk", "n1")
    for name in ("file/below", "new/" + "n" * 300):
        with pytest.raises(ToolError, match=r"cannot|leads over"):
            write(journal, root, name, b"y")
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert not list((tmp_path / "writes" / "talk").iterdir())


def test_writes_that_are_not_stored_are_undone_in_each_conversation(tmp_path: Path) -> None:
    root = Root(tmp_path)
    journal = Journal(None)
    for conversation, node, name in (("talk", "n1", "a.txt"), ("other", "n2", "b.txt")):
        journal.begin(conversation, node)
        write(journal, root, name, b"made")
    journal.begin("talk")
    assert journal.undo({"n1"}).restored == (str(tmp_path / "a.txt"),)
    journal.begin("other")
    assert journal.undo({"n2"}).restored == (str(tmp_path / "b.txt"),)
    assert snapshot(tmp_path) == {}
