"""Pictures in the history: stored once, loaded with their messages, deleted with the last of them."""

from pathlib import Path

from localchat.chat.conversation import Conversation, Node
from localchat.engine.request import Attachment, Message
from localchat.history.store import History
from tests.support.histories import purge_deleted, record
from tests.support.media import png

PICTURE = Attachment("image", png(), 3, "chart.png")


def conversation(history: History, *attachments: Attachment) -> tuple[Conversation, Node]:
    created = Conversation(model="m")
    node = created.add(Message("user", "one two", attachments=attachments), parent=None)
    record(history, created, [node])
    return created, node


def stored(history: History) -> int:
    with history._database.read() as connection:
        return int(connection.execute("SELECT count(*) FROM media").fetchone()[0])


def test_attachments_are_stored_once_and_loaded_again(tmp_path: Path) -> None:
    with History.open(tmp_path / "history.db") as history:
        first, node = conversation(history, PICTURE)
        second, _ = conversation(history, PICTURE, Attachment("image", png(9, 9), 3))
        edited = first.add(Message("user", "again", attachments=(PICTURE,)), parent=None)
        record(history, first, [edited])
        assert stored(history) == 2
        loaded = history.load(first.id)
        assert loaded.nodes[node.id].message == node.message
        assert loaded.nodes[edited.id].message.attachments == (PICTURE,)
        history.delete(second.id)
        purge_deleted(history)
        assert stored(history) == 1
        history.delete(first.id)
        purge_deleted(history)
        assert stored(history) == 0


def test_a_withdrawn_question_takes_its_pictures_along(tmp_path: Path) -> None:
    with History.open(tmp_path / "history.db") as history:
        created, node = conversation(history)
        question = created.add(Message("user", "q", attachments=(PICTURE,)), parent=node.id)
        record(history, created, [question])
        assert stored(history) == 1
        history.withdraw(created.id, question)
        assert stored(history) == 0


def test_a_message_without_the_bytes_of_its_picture_still_loads(tmp_path: Path) -> None:
    with History.open(tmp_path / "history.db") as history:
        created, node = conversation(history, PICTURE)
        with history._database.write() as connection:
            connection.execute("DELETE FROM media")
        loaded = history.load(created.id).nodes[node.id].message
        assert (loaded.content, loaded.attachments) == ("one two", ())
