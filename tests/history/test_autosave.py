"""State of the disk while an answer streams, and after the program was killed."""

import random
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from localchat.chat.conversation import Conversation
from localchat.engine.request import Message
from localchat.errors import HistoryUnusable
from localchat.history.autosave import Autosave
from localchat.history.store import History
from localchat.session.recorder import ConversationRecorder
from tests.support.histories import record

_LAST_SECOND = 1.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite3"


class Loss(NamedTuple):
    """Words sent a second before the program was killed, and words found on the disk."""

    handed_over: int
    written: int
    drafted: int


def killed(path: Path, after_s: float) -> Loss:
    """Stream, kill, look. What is on the disk is checked to be a whole beginning of what was said."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.support.autosave_process", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent.parent,
    )
    assert program.stdout is not None
    told = [program.stdout.readline().split()]
    threading.Timer(after_s, program.kill).start()
    told += [line.split() for line in program.stdout if line.endswith("\n")]
    killed_s = time.monotonic()
    program.wait()
    program.stdout.close()
    early = [int(count) for _, at, count in told if float(at) < killed_s - _LAST_SECOND]
    with History.open(path) as history:
        last = history.last()
        if last is None:
            return Loss(max(early, default=0), 0, 0)
        answer = history.load(last.id).path()[-1]
        written = answer.message.content.split()
        assert written == [f"word{number}" for number in range(1, len(written) + 1)]
        assert answer.state == "open" or not written
        assert not written or history.search("word1")
        drafted = history.draft(last.id).removeprefix("draft") or "0"
        kept = Conversation()
        kept.add(Message("user", "it goes on"), parent=None)
        record(history, kept, kept.nodes.values())
    return Loss(max(early, default=0), len(written), int(drafted))


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_program_loses_at_most_the_last_second(tmp_path: Path, seed: int) -> None:
    """Tried again where it lost more: a machine that lets no thread run for a second is no fault of ours."""
    chance = random.Random(seed)
    for attempt in range(10):
        loss = killed(tmp_path / f"{attempt}.sqlite3", 1.05 + chance.random())
        if loss.handed_over and min(loss.written, loss.drafted) >= loss.handed_over:
            return
    pytest.fail(f"more than a second is lost: {loss}")


def test_changed_never_waits_for_the_disk(path: Path) -> None:
    """Another program holds the file for longer than a person would wait."""
    conversation = Conversation()
    with History.open(path) as history, closing(Autosave(history, conversation)) as save:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        node = conversation.add(Message("user", "hi"), parent=None)
        done = threading.Event()

        def change() -> None:
            save.changed(node)
            save.draft("next")
            done.set()

        threading.Thread(target=change, daemon=True).start()
        assert done.wait(90)
        with pytest.raises(sqlite3.OperationalError):
            sqlite3.connect(path, timeout=0).execute("BEGIN IMMEDIATE")
        other.execute("COMMIT")
        other.close()
        save.flush()
        assert list(history.load(conversation.id).nodes) == [node.id]
        assert history.draft(conversation.id) == "next"


def test_a_write_that_fails_is_tried_again_and_nothing_is_lost(path: Path) -> None:
    conversation = Conversation()
    with History.open(path) as history:
        save = Autosave(history, conversation, cadence_s=0.01)
        control = sqlite3.connect(path, isolation_level=None)
        control.execute(
            "CREATE TRIGGER no BEFORE INSERT ON nodes BEGIN SELECT RAISE(ABORT, 'not now'); END"
        )
        first = conversation.add(Message("user", "first"), parent=None)
        save.changed(first)
        with pytest.raises(HistoryUnusable, match="not now"):
            save.flush()
        control.execute("DROP TRIGGER no")
        control.close()
        second = conversation.add(Message("assistant", "second"), parent=first.id)
        save.changed(second)
        save.close()
        assert save.problem is None
        assert history.load(conversation.id).title == "first"
        assert list(history.load(conversation.id).nodes) == [first.id, second.id]


def test_a_flush_tries_again_what_failed_before(path: Path) -> None:
    conversation = Conversation()
    with (
        History.open(path) as history,
        closing(Autosave(history, conversation, cadence_s=0.01)) as save,
    ):
        control = sqlite3.connect(path, isolation_level=None)
        control.execute(
            "CREATE TRIGGER no BEFORE INSERT ON nodes BEGIN SELECT RAISE(ABORT, 'not now'); END"
        )
        save.changed(conversation.add(Message("user", "first"), parent=None))
        save.draft("next")
        with pytest.raises(HistoryUnusable):
            save.flush()
        control.execute("DROP TRIGGER no")
        control.close()
        save.flush()
        assert [one.title for one in history.list()] == ["first"]
        assert history.draft(conversation.id) == "next"


def test_a_conversation_that_cannot_be_left_for_another_one_is_still_recorded(path: Path) -> None:
    with History.open(path) as history:
        conversation, recorder = Conversation(), ConversationRecorder()
        recorder.hold(conversation)
        recorder.attach(history)
        control = sqlite3.connect(path, isolation_level=None)
        control.execute(
            "CREATE TRIGGER no BEFORE INSERT ON nodes BEGIN SELECT RAISE(ABORT, 'disk full'); END"
        )
        first = conversation.add(Message("user", "first"), parent=None)
        recorder.changed(first)
        with pytest.raises(HistoryUnusable, match="disk full"):
            recorder.hold(Conversation())
        control.execute("DROP TRIGGER no")
        control.close()
        second = conversation.add(Message("assistant", "second"), parent=first.id)
        recorder.changed(second)
        recorder.hold(Conversation())
        assert list(history.load(conversation.id).nodes) == [first.id, second.id]


def test_close_reports_what_cannot_be_kept_and_ends(path: Path) -> None:
    conversation = Conversation()
    history = History.open(path)
    save = Autosave(history, conversation)
    history.close()
    save.changed(conversation.add(Message("user", "hi"), parent=None))
    with pytest.raises(HistoryUnusable):
        save.close()
    save.close()


def test_the_newest_state_of_a_message_wins_and_its_title_comes_from_the_question() -> None:
    conversation = Conversation()
    with History.open(None) as history:
        with closing(Autosave(history, conversation)) as save:
            question = conversation.add(Message("user", "What is\na KV cache?"), parent=None)
            save.changed(question)
            node = conversation.add(Message("assistant"), parent=question.id, state="open")
            for size in range(1, 50):
                node = replace(node, message=Message("assistant", "x" * size))
                conversation.put(node)
                save.changed(node)
            node = replace(node, state="whole")
            conversation.put(node)
            save.changed(node)
        after = history.load(conversation.id)
        assert after.nodes[node.id] == node
        assert after.title == "What is"
        assert after.head == node.id


def test_a_conversation_without_a_message_leaves_no_trace_but_its_draft() -> None:
    with History.open(None) as history:
        with closing(Autosave(history, Conversation())) as save:
            save.changed()
            save.draft("unsent")
        assert history.list() == []
        assert history.draft(None) == "unsent"


def test_a_draft_leaves_the_nameless_place_when_its_conversation_begins() -> None:
    conversation = Conversation()
    with History.open(None) as history:
        history.put_draft(None, "from the last start")
        with closing(Autosave(history, conversation)) as save:
            save.draft("first question")
            save.flush()
            assert history.draft(None) == "first question"
            save.changed(conversation.add(Message("user", "first question"), parent=None))
            save.draft("")
            save.flush()
            assert (history.draft(None), history.draft(conversation.id)) == ("", "")
            history.put_draft(None, "of another program")
            save.draft("second question")
        assert history.draft(None) == "of another program"
        assert history.draft(conversation.id) == "second question"


def test_what_is_not_written_in_time_is_an_error(path: Path) -> None:
    conversation = Conversation()
    with History.open(path) as history, closing(Autosave(history, conversation)) as save:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        save.changed(conversation.add(Message("user", "hi"), parent=None))
        with pytest.raises(HistoryUnusable, match="not written within"):
            save.flush(0.05)
        other.execute("COMMIT")
        other.close()


def test_a_question_does_not_wait_for_the_cadence(path: Path) -> None:
    conversation = Conversation()
    with (
        History.open(path) as history,
        closing(Autosave(history, conversation, cadence_s=60)) as save,
    ):
        first = conversation.add(Message("assistant", "begun"), parent=None)
        save.changed(first)
        while history.last() is None:
            time.sleep(0.01)
        save.changed(conversation.add(Message("user", "and?"), parent=first.id))
        while len(history.load(conversation.id).nodes) < 2:
            time.sleep(0.01)
        assert history.load(conversation.id).path()[-1].message.content == "and?"
