"""The file of conversations: what goes in comes out, whoever else writes."""

import os
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from localchat.chat.conversation import AnswerMetrics, Conversation, Inclusion, Node, Policy
from localchat.engine.events import Done, Speculation, Timings, Usage
from localchat.engine.request import CalledTool, Message
from localchat.errors import UsageError
from localchat.history.store import History
from tests.support.conversations import kept
from tests.support.histories import purge_deleted, put_node, record

DONE = Done(
    Usage(12, 4, 3),
    Timings(0.5, 0.0, 0.41, 200.0, 62.04, 16.0, 20.0, 21.0, 1.0),
    412,
    32768,
    Speculation(51, 34, off=""),
    "f1",
)
METRICS = AnswerMetrics("tiny", "llamacpp", "Q8_0", "f16", 2**63 - 1, DONE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history.sqlite3"


@pytest.fixture
def history(path: Path) -> Iterator[History]:
    with History.open(path) as opened:
        yield opened


def test_everything_of_a_conversation_comes_back(history: History) -> None:
    before = Conversation(
        title="a title",
        model="m:7b",
        system="be brief",
        policy=Policy("leave_out_oldest", ("x",), 7),
    )
    call = CalledTool("f", '{"a": 1}', "c1")
    question = before.add(
        Message("user", "hi"), parent=None, inclusions=[Inclusion("f.txt", 0, 2, "/f.txt")]
    )
    node = before.add(Message("assistant", "yo", "hm", (call,)), parent=question.id)
    before.put(replace(node, metrics=METRICS, state="length", error="why"))
    before.add(Message("system", "sum"), parent=node.id, replaces=[question.id, node.id])
    before.back_to(node.id)
    record(history, before, before.nodes.values())
    assert history.load(before.id) == before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec=None), max_size=30), min_size=6, max_size=6))
def test_any_text_comes_back_as_it_was(texts: list[str]) -> None:
    content, reasoning, model, system, error, draft = texts
    before = Conversation(title="t", model=model, system=system)
    node = before.add(Message("user", content, reasoning=reasoning), parent=None)
    before.put(replace(node, error=error))
    with History.open(None) as history:
        record(history, before, before.nodes.values())
        history.put_draft(before.id, draft)
        after = history.load(before.id)
        assert after == before
        assert history.draft(before.id) == draft


def test_a_message_of_a_megabyte_with_every_hostile_character_comes_back(history: History) -> None:
    text = "a\x00\ud800\udfff\x1b]0;t\x07\u202e" * 100_000
    conversation = kept(history, text)
    assert history.load(conversation.id).nodes == conversation.nodes


def test_ids_may_be_shortened_while_they_are_unique(history: History) -> None:
    one, other = Conversation(id="aaaa1" + "0" * 27), Conversation(id="aaaa2" + "0" * 27)
    for conversation in (one, other):
        conversation.add(Message("user", "hi"), parent=None)
        record(history, conversation, conversation.nodes.values())
    assert history.load("aaaa1").id == one.id
    assert history.load(one.id.upper()).id == one.id
    with pytest.raises(UsageError, match="several"):
        history.load("aaaa")
    for wrong, said in (
        ("aaa", "too short"), ("", "too short"), ("bbbb", "there is no"), ("%", "there is no"),
        ("zzzz", "there is no"), ("aaaa1' OR 1", "there is no"), ("\ud800aaa", "there is no"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            history.load(wrong)


def test_a_message_whose_parent_is_lost_does_not_lose_the_conversation(
    history: History, path: Path
) -> None:
    conversation = kept(history, "one", "two", "three")
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM nodes WHERE content = 'two'")
    connection.close()
    after = history.load(conversation.id)
    assert [node.message.content for node in after.path()] == ["three"]
    assert len(after.nodes) == 2


def test_a_message_that_cannot_be_read_keeps_its_text(history: History, path: Path) -> None:
    conversation = kept(history, "one", "two")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE nodes SET rest = CAST('{' AS BLOB) WHERE content = 'two'")
        connection.execute("UPDATE conversations SET policy = CAST('[]' AS BLOB)")
    connection.close()
    after = history.load(conversation.id)
    assert [node.message.content for node in after.path()] == ["one", "two"]
    assert after.path()[1].state == "failed"
    assert after.path()[1].error
    assert after.policy == Policy()


def test_the_list_has_a_limit_and_the_newest_first(history: History) -> None:
    made = [kept(history, f"question {number}") for number in range(7)]
    record(history, Conversation())  # nothing was said in it
    first = history.list(3)
    assert first == history.list()[:3]
    assert [one.id for one in history.list()] == [one.id for one in reversed(made)]
    assert first[0].title == "question 6"
    assert first[0].messages == 1
    last = history.last()
    assert last is not None
    assert last.id == made[-1].id


@pytest.mark.parametrize("offset_s", [4e8, 4e11, -1e10])
def test_the_last_conversation_is_that_of_the_newest_message_although_the_clock_jumped(
    history: History, monkeypatch: pytest.MonkeyPatch, offset_s: float
) -> None:
    clock = time.time
    for offsets_s in ((offset_s, 0.0), (0.0, offset_s)):
        monkeypatch.setattr(time, "time", lambda: clock() + offsets_s[0])  # noqa: B023
        earlier = kept(history, "before the jump")
        monkeypatch.setattr(time, "time", lambda: clock() + offsets_s[1])  # noqa: B023
        later = kept(history, "after the jump")
        last = history.last()
        assert last is not None
        assert last.id == later.id
        assert not earlier.id.startswith("-") and not later.id.startswith("-")
        history.delete(later.id)
        last = history.last()
        assert last is not None
        assert last.id == earlier.id


def test_deleted_ones_are_hidden_restored_and_purged(history: History) -> None:
    one, other = kept(history, "alpha first"), kept(history, "alpha second")
    history.delete(one.id)
    assert [summary.id for summary in history.list()] == [other.id]
    assert [hit.summary.id for hit in history.search("alpha")] == [other.id]
    with pytest.raises(UsageError):
        history.load(one.id)
    with pytest.raises(UsageError, match="too short"):
        history.restore(one.id[:3])
    assert history.restore(one.id[:8]) == one.id
    assert len(history.search("alpha")) == 2
    history.delete(one.id)
    assert history.purge(time.time()) == 0
    assert purge_deleted(history) == 1
    with pytest.raises(UsageError, match="no removed conversation begins with"):
        history.restore(one.id)
    assert [hit.summary.id for hit in history.search("alpha")] == [other.id]
    with History.open(None) as empty:
        assert empty.purge(time.time()) == 0


DAY_S = 24 * 3600


def test_a_start_with_a_wrong_clock_deletes_nothing_for_good(history: History) -> None:
    now_s = time.time()
    conversation = kept(history, "a question")
    history.delete(conversation.id)
    for wrong_s in (now_s + 40 * DAY_S, now_s + 4000 * DAY_S, 0.0):
        assert history.purge(wrong_s) == 0
        assert history.purge(now_s + DAY_S) == 0
    assert history.restore(conversation.id) == conversation.id


def test_a_conversation_is_purged_once_two_starts_a_day_apart_agree(history: History) -> None:
    now_s = time.time()
    history.delete(kept(history, "a question").id)
    assert history.purge(now_s + 29 * DAY_S) == 0
    assert history.purge(now_s + 31 * DAY_S) == 0
    assert history.purge(now_s + 31.5 * DAY_S) == 0
    assert history.purge(now_s + 33 * DAY_S) == 1


def test_a_mark_from_the_future_is_renewed(history: History) -> None:
    now_s = time.time()
    history.delete(kept(history, "a question").id)
    assert history.purge(now_s + 400 * DAY_S) == 0
    assert history.purge(now_s + 31 * DAY_S) == 0
    assert history.purge(now_s + 33 * DAY_S) == 1


def test_a_restored_conversation_has_its_whole_time_again(history: History) -> None:
    now_s = time.time()
    conversation = kept(history, "a question")
    history.delete(conversation.id)
    assert history.purge(now_s + 31 * DAY_S) == 0
    history.restore(conversation.id)
    history.delete(conversation.id)
    assert history.purge(now_s + 33 * DAY_S) == 0


def test_a_deletion_under_a_clock_that_is_behind_counts_from_the_last_message(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    conversation = kept(history, "a question")
    with monkeypatch.context() as context:
        context.setattr("localchat.history.store.time.time", lambda: 0.0)
        history.delete(conversation.id)
    assert history.purge(now_s + DAY_S) == 0
    assert history.purge(now_s + 3 * DAY_S) == 0
    assert history.restore(conversation.id) == conversation.id


def test_who_goes_on_writing_takes_a_deletion_back(history: History) -> None:
    conversation = kept(history, "one")
    history.delete(conversation.id)
    put_node(history, conversation.id, conversation.add(Message("assistant", "two"), parent=None))
    assert len(history.load(conversation.id).nodes) == 2


def test_a_new_title_is_not_undone_by_a_program_that_knows_the_old_one(path: Path) -> None:
    with History.open(path) as one, History.open(path) as other:
        conversation = kept(one, "what is a fnord")
        other.rename(conversation.id, "about  fnords")
        conversation.system = "be brief"
        record(one, conversation)
        after = other.load(conversation.id)
        assert (after.title, after.system) == ("about fnords", "be brief")
        assert [hit.summary.title for hit in one.search("about")] == ["about fnords"]
        with pytest.raises(UsageError):
            one.rename(conversation.id, " \n")


def test_nor_by_one_that_read_it_before_its_history_was_opened(path: Path) -> None:
    with History.open(path) as one:
        conversation = kept(one, "what is a fnord")
        with History.open(path) as other:
            other.rename(conversation.id, "about fnords")
    with History.open(path) as later:
        record(later, conversation, [conversation.add(Message("assistant", "no"), parent=None)])
        assert later.load(conversation.id).title == "about fnords"


def test_two_programs_in_one_conversation_both_keep_their_messages(path: Path) -> None:
    with History.open(path) as one, History.open(path) as other:
        mine = kept(one, "question")
        theirs = other.load(mine.id)
        root = mine.head
        record(one, mine, [mine.add(Message("assistant", "mine"), parent=root)])
        record(other, theirs, [theirs.add(Message("assistant", "theirs"), parent=root)])
        after = one.load(mine.id)
        assert {node.message.content for node in after.children(root)} == {"mine", "theirs"}
        assert after.head == theirs.head


def test_many_writers_at_once_lose_nothing(path: Path) -> None:
    conversation = Conversation()

    def write(number: int) -> None:
        with History.open(path) as history:
            for count in range(15):
                node = Node(f"{number}-{count}", None, Message("user", f"{number} {count}"))
                put_node(history, conversation.id, node)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    with History.open(path) as history:
        record(history, conversation)
        assert len(history.load(conversation.id).nodes) == 60


def test_drafts_are_kept_for_each_conversation_and_for_none(history: History) -> None:
    history.put_draft(None, "half a")
    history.put_draft("c1", "other")
    assert (history.draft(None), history.draft("c1"), history.draft("c2")) == (
        "half a",
        "other",
        "",
    )
    history.put_draft(None, "half a thought")
    history.put_draft("c1", "")
    assert (history.draft(None), history.draft("c1")) == ("half a thought", "")


def test_a_draft_of_another_window_is_shown_once_that_window_is_closed(
    history: History, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as window:
        monkeypatch.setattr(os, "getpid", lambda: window.pid)
        history.put_draft(None, "of a window")
        monkeypatch.undo()
        with History.open(path) as second:
            assert second.draft(None) == ""
            second.put_draft(None, "of the second window")
            second.put_draft(None, "")
            window.kill()
            window.wait()
            assert second.draft(None) == "of a window"
            second.put_draft(None, "of a window, longer")
            second.put_draft(None, "")
            assert second.draft(None) == ""


def test_the_file_is_for_its_owner_alone(history: History, path: Path) -> None:
    kept(history, "secret")
    files = list(path.parent.glob("history.sqlite3*"))
    assert len(files) >= 2
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_a_question_that_is_withdrawn_leaves_what_was_there_before(history: History) -> None:
    conversation = Conversation()
    first = conversation.add(Message("user", "first words"), parent=None)
    record(history, conversation, [first])
    second = conversation.add(Message("user", "second words"), parent=first.id)
    record(history, conversation, [second])
    history.withdraw(conversation.id, second)
    assert history.load(conversation.id).path() == (first,)
    assert not history.search("second")
    history.withdraw(conversation.id, first)
    assert history.list() == []
    assert not history.search("first")
    record(history, conversation, [first])
    assert history.search("first")
