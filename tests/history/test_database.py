"""Opening the file: older versions, newer ones, damaged ones."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from localchat.chat.conversation import Conversation
from localchat.engine.request import Message
from localchat.errors import HistoryUnusable
from localchat.history.migrations import VERSION
from localchat.history.store import History
from tests.support.conversations import kept
from tests.support.histories import put_node, record

FIRST_VERSION = """
CREATE TABLE conversations (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL,
    created_s REAL NOT NULL, updated_s REAL NOT NULL, model BLOB NOT NULL, system BLOB NOT NULL,
    policy BLOB NOT NULL, head TEXT, deleted_s REAL);
CREATE INDEX conversations_by_time ON conversations (updated_s DESC, id DESC) WHERE deleted_s IS NULL;
CREATE INDEX conversations_deleted ON conversations (deleted_s) WHERE deleted_s IS NOT NULL;
CREATE TABLE nodes (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, conversation TEXT NOT NULL,
    parent TEXT, role TEXT NOT NULL, state TEXT NOT NULL, created_s REAL NOT NULL,
    content TEXT NOT NULL, exact BLOB, rest BLOB NOT NULL);
CREATE INDEX nodes_of_conversation ON nodes (conversation);
INSERT INTO conversations VALUES (1, 'c1', 'old title', 1.5, 2.5, CAST('m' AS BLOB), x'', CAST('{}' AS BLOB),
    'n3', NULL);
INSERT INTO nodes VALUES (1, 'n1', 'c1', NULL, 'user', 'whole', 1.5, 'an old question', NULL,
    CAST('{"id": "n1", "parent": null, "message": {"role": "user"}, "created_s": 1.5}' AS BLOB));
INSERT INTO nodes VALUES (2, 'n2', 'c1', 'n1', 'assistant', 'open', 2.0, 'half an ans', NULL,
    CAST('{"id": "n2", "parent": null, "message": {"role": "assistant"}, "state": "open"}' AS BLOB));
INSERT INTO nodes VALUES (3, 'n3', 'c1', 'n1', 'assistant', 'whole', 2.5, 'an old answer', NULL,
    CAST('{"id": "n3", "parent": null, "message": {"role": "assistant"}}' AS BLOB));
PRAGMA user_version = 1;
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite3"


def written(path: Path, script: str) -> Path:
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()
    return path


def test_an_error_of_the_disk_says_what_may_help(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> sqlite3.Connection:
        problem = sqlite3.OperationalError("disk I/O error")
        problem.sqlite_errorcode = (
            sqlite3.SQLITE_IOERR_SHMSIZE
        )  # as where a full disk has no room for it
        raise problem

    monkeypatch.setattr("localchat.history.database.sqlite3.connect", fails)
    with pytest.raises(HistoryUnusable) as refused:
        History.open(path)
    assert refused.value.hint == "the disk may be full or failing: make room and try again"


def test_a_file_of_the_first_version_is_brought_up_with_all_it_holds(path: Path) -> None:
    with History.open(written(path, FIRST_VERSION)) as history:
        conversation = history.load("c1")
        assert [node.message.content for node in conversation.path()] == [
            "an old question",
            "an old answer",
        ]
        assert conversation.nodes["n2"].state == "open"
        assert [hit.node_id for hit in history.search("old answ")] == ["n3"]
        assert [hit.node_id for hit in history.search("half")] == ["n2"]
        assert [hit.node_id for hit in history.search("old title")] == [None]
        history.put_draft(None, "x")
        assert history.draft(None) == "x"
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_a_file_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    written(path, f"CREATE TABLE future (x); PRAGMA user_version = {VERSION + 1};")
    before = path.read_bytes()
    with pytest.raises(HistoryUnusable, match="newer") as caught:
        History.open(path)
    assert caught.value.details == {"version": VERSION + 1, "known_version": VERSION}
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "content",
    [
        b"not a database at all, but long enough for one " * 30,
        b"SQLite format 3\0" + b"\xff" * 4096,
    ],
)
def test_a_damaged_file_is_set_aside_and_said(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with History.open(path) as history:
        assert "set aside" in history.notice
        kept(history, "goes on")
    (aside,) = path.parent.glob("*.broken-*")
    assert aside.read_bytes() == content
    assert aside.name in history.notice
    with History.open(path) as again:
        assert not again.notice
        assert len(again.list()) == 1


def test_a_place_that_cannot_be_used_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file" / "h.sqlite3", tmp_path):
        with pytest.raises(HistoryUnusable) as caught:
            History.open(place)
        assert "a new conversation with --no-history" in caught.value.hint


def test_text_that_sqlite_cannot_take_is_an_error_of_ours(path: Path) -> None:
    with History.open(path) as history, pytest.raises(HistoryUnusable):
        history.put_draft("\ud800", "x")


def test_a_file_in_use_can_be_opened_and_read(path: Path) -> None:
    with History.open(path) as history:
        kept(history, "hi")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with History.open(path) as again:
            assert len(again.search("hi")) == 1
        other.close()


def test_a_table_that_goes_missing_is_an_error_of_ours(path: Path) -> None:
    with History.open(path) as history:
        kept(history, "hi")
        connection = sqlite3.connect(path)
        connection.execute("DROP TABLE drafts")
        connection.close()
        with pytest.raises(HistoryUnusable, match="no such table"):
            history.draft(None)


def test_a_failed_write_leaves_nothing_half(path: Path) -> None:
    with History.open(path) as history:
        conversation = Conversation()
        good = conversation.add(Message("user", "good"), parent=None)
        bad = conversation.add(Message("user", "bad"), parent=None)
        connection = sqlite3.connect(path)
        connection.execute(
            "CREATE TRIGGER no BEFORE INSERT ON nodes WHEN new.content = 'bad' "
            "BEGIN SELECT RAISE(ABORT, 'no bad ones'); END"
        )
        connection.close()
        with pytest.raises(HistoryUnusable, match="no bad ones"):
            record(history, conversation, [good, bad])
        assert history.list() == []
        record(history, conversation, [good])
        assert len(history.load(conversation.id).nodes) == 1


def test_in_memory_nothing_touches_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with History.open(None) as history:
        kept(history, "gone soon")
        assert len(history.search("soon")) == 1
    assert list(tmp_path.iterdir()) == []


def _large_conversation(path: Path) -> None:
    with closing(History.open(path)) as history:
        conversation = Conversation()
        question = conversation.add(Message("user", "word " * 1_000_000), parent=None)
        record(history, conversation)
        put_node(history, conversation.id, question)
        assert path.stat().st_size + Path(f"{path}-wal").stat().st_size > 1_000_000
        history.withdraw(conversation.id, question)


def test_space_of_a_withdrawn_question_is_released(path: Path) -> None:
    _large_conversation(path)
    assert path.stat().st_size < 500_000


def test_space_is_released_in_a_file_of_an_older_version(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.executescript(FIRST_VERSION)
    connection.close()
    _large_conversation(path)
    assert path.stat().st_size < 500_000
    with closing(History.open(path)) as history:
        assert history.load("c1").nodes["n3"].message.content == "an old answer"


def test_a_history_that_cannot_be_written_is_read_with_its_newest_messages(
    path: Path, tmp_path: Path
) -> None:
    with History.open(path) as history:
        conversation = kept(history, "is it so?", "Yes.")
        # The newest messages are in the log while a program has the file open.
        copy = tmp_path / "copy" / path.name
        shutil.copytree(path.parent, copy.parent, ignore=shutil.ignore_patterns("copy", "*-shm"))
    assert Path(f"{copy}-wal").stat().st_size
    # Like a full or read-only disk, this prevents the index of the log, also for root.
    Path(f"{copy}-shm").symlink_to("/nonexistent/file")
    with pytest.raises(HistoryUnusable):
        History.open(copy)
    with History.open_read_only(copy) as history:
        assert [row.id for row in history.list()] == [conversation.id]
        assert history.load(conversation.id).nodes.keys() == conversation.nodes.keys()
        with pytest.raises(HistoryUnusable, match="readonly"):
            history.rename(conversation.id, "another title")
