"""`localchat cache`: what the disk keeps of conversations is listed, deleted, and goes with them."""

import json
import time

import pytest

from localchat.cli.chat.conversation_options import HISTORY_FILE
from localchat.config.paths import find_paths
from localchat.history.store import History
from localchat.kv_store.store import KVStore
from tests.support.cli_program import SCENARIOS, ScriptedApp
from tests.support.conversations import kept
from tests.support.histories import purge_deleted
from tests.support.kv_texts import keep
from tests.support.terminal_screen import Call


def filled(*models: str, owner: str = "") -> KVStore:
    store = KVStore(find_paths({}).kv_dir, 1 << 30)
    for model in models:
        keep(store.namespace(model, model), "a text that was computed", owner=owner)
    assert store.writer.drain(60)
    return store


def test_nothing_kept_is_said_and_is_no_error(call: Call) -> None:
    assert "No KV of conversations" in call((), "cache", "list").out
    assert json.loads(call((), "cache", "list", "--json").out) == []
    assert call((), "cache").out == call((), "cache", "list").out
    assert call((), "cache", "clear", "--yes").code == 0


def test_models_are_listed_and_one_is_cleared(call: Call) -> None:
    store = filled("first", "second")
    listed = call((), "cache", "list").out
    assert "first" in listed and "second" in listed and "in all" in listed
    assert call((), "cache", "clear", "first", "--yes").code == 0
    assert "no KV of first is stored; " in call((), "cache", "clear", "first").err
    assert [line["model"] for line in json.loads(call((), "cache", "list", "--json").out)] == [
        "second"
    ]
    assert call((), "cache", "clear", "--yes").code == 0
    assert not list(store.files())


def test_a_deleted_conversation_keeps_its_kv_until_it_can_no_longer_be_restored(call: Call) -> None:
    assert call(SCENARIOS["hello"], "hi").code == 0
    [summary] = json.loads(call((), "history", "list", "--json").out)
    store = filled("model", owner=summary["id"])
    assert list(store.files())
    assert call((), "history", "rm", summary["id"], "--yes").code == 0
    assert list(store.files())
    with History.open(find_paths({}).data_dir / HISTORY_FILE, store.folder) as history:
        history.purge(time.time())
        assert list(store.files())
        purge_deleted(history)
    assert not list(store.files())


@pytest.mark.parametrize("flag", ["--no-history", "--no-cache-disk", ""])
def test_a_request_names_its_conversation_only_where_conversations_are_kept(
    call: Call, flag: str
) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, *filter(None, [flag]), "hi").code == 0
    assert bool(app.engines[0].requests[0].owner) == (flag != "--no-history")
    assert (app.options[0].kv_folder is not None) == (not flag)


def test_a_history_without_kv_deletes_as_before() -> None:
    with History.open(None, find_paths({}).kv_dir) as history:
        conversation = kept(history, "a question", "an answer")
        history.delete(conversation.id)
        assert history.list() == []
