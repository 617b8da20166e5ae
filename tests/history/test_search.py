"""Search: words, beginnings of words, phrases, scripts without spaces, and any text as a query."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import convert, to_builtins
from msgspec.structs import replace

from localchat.chat.conversation import Conversation, Node
from localchat.engine.request import Message
from localchat.history.search_query import parse, snippet
from localchat.history.store import History
from tests.support.conversations import kept, talk
from tests.support.histories import purge_deleted, put_node, record


@pytest.fixture(scope="module")
def history() -> Iterator[History]:
    with History.open(None) as opened:
        kept(opened, "How do I parse C++ templates?", "Use clang: auto x = parse(foo->bar);")
        kept(opened, "今天天气怎么样", "天气很好")
        kept(opened, "Le café est fermé", "100 % sure_thing", title="Über alles")
        kept(opened, 'She said "hello there" AND left', "NOT NEAR(a b) * ^ - column:x {y}")
        kept(opened, "เมื่อวานฝนตก", "emoji 🎉 party")
        kept(opened, "nul \x00 inside and \ud800 lone")
        yield opened


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("parse", 1),
        ("pars templ", 1),
        ("PARSE", 1),
        ("arse", 0),
        ("parse café", 0),
        ("c++", 1),
        ("foo->bar", 1),
        ("->", 1),
        ("天气", 1),
        ("天 样", 1),
        ("气天", 0),
        ("cafe ferme", 1),
        ("uber", 1),
        ("sure_th", 1),
        ("sure%thing", 0),
        ("100 %", 1),
        ('"hello there"', 1),
        ('"there hello"', 0),
        ('"hello th', 1),
        ('"', 1),
        ("AND left", 1),
        ("NOT NEAR(a", 1),
        ("column:x", 1),
        ("{y}", 1),
        ("* ^ -", 1),
        ("ฝน", 1),
        ("🎉", 1),
        ("nul inside", 1),
        ("", 0),
        ("  \n", 0),
        ("\x00", 1),
        ("\ud800 lone", 1),
    ],
)
def test_a_query_finds_what_it_says(history: History, query: str, found: int) -> None:
    assert len(history.search(query)) == found


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(codec=None), max_size=20))
def test_any_text_is_a_query(history: History, query: str) -> None:
    history.search(query)


def test_a_hit_names_the_message_and_marks_the_words(history: History) -> None:
    (hit,) = history.search("clang")
    node = history.load(hit.summary.id).nodes[hit.node_id or ""]
    assert node.message.content.startswith("Use clang")
    assert [hit.snippet[start:end] for start, end in hit.marks] == ["clang"]
    (hit,) = history.search("alles")
    assert hit.node_id is None
    assert hit.snippet == "Über alles"


def test_a_snippet_is_one_line_around_the_match() -> None:
    text = "word " * 100 + "the\n\tneedle is here" + " tail" * 100
    shown = snippet(text, ("needle",))
    assert len(shown.text) < 200
    assert "\n" not in shown.text
    assert shown.text.startswith("…")
    assert shown.text.endswith("…")
    ((start, end),) = shown.marks
    assert shown.text[start:end] == "needle"


def test_changed_text_is_found_by_its_new_words_alone() -> None:
    with History.open(None) as history:
        conversation = talk("question", "growing")
        node = conversation.nodes[conversation.head or ""]
        growing = replace(node, state="open")
        conversation.put(growing)
        record(history, conversation, conversation.nodes.values())
        assert len(history.search("growing")) == 1
        for text, state in (("grown tall", "whole"), ("other words", "stopped")):
            message = Message("assistant", text)
            put_node(history, conversation.id, replace(node, message=message, state=state))
            assert len(history.search(text)) == 1
        assert not history.search("growing")
        assert not history.search("tall")


def test_what_was_erased_is_not_found_in_what_takes_its_place() -> None:
    with History.open(None) as history:
        history.delete(kept(history, "needle in the first one").id)
        purge_deleted(history)
        kept(history, "nothing of the kind", title="other")
        assert history.search("needle") == []
        assert history.search("first") == []


def test_each_conversation_is_found_once_and_no_more_than_asked_for() -> None:
    with History.open(None) as history:
        made = [kept(history, "needle one", "needle two") for _ in range(5)]
        hits = history.search("needle", 3)
        assert [hit.summary.id for hit in hits] == [one.id for one in reversed(made[-3:])]


def test_a_query_without_letters_is_taken_as_it_lies() -> None:
    assert parse('"').parts == ('"',)
    assert not parse(" \t").parts


_TEXTS = st.lists(st.sampled_from(["alpha", "beta", "gamma", "天气", "x-y"]), max_size=3)
_STATES = st.sampled_from(["open", "whole", "stopped"])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), _TEXTS, _STATES), max_size=25))
def test_the_index_follows_every_change(changes: list[tuple[int, int, list[str], str]]) -> None:
    """Messages are written, change and are erased in any order; a search finds what a look would."""
    with History.open(None) as history:
        talks = [Conversation(title="t") for _ in range(4)]
        for place, which, words, state in changes:
            conversation = talks[place]
            node = Node(f"{place}-{which}", None, Message("user", " ".join(words)))
            node = convert({**to_builtins(node), "state": state}, Node)
            if len(words) == 3 and words[0] == words[1]:
                record(history, conversation)
                history.delete(conversation.id)
                purge_deleted(history)
                conversation.nodes.clear()
            conversation.nodes[node.id] = node
            record(history, conversation, [node])
        for word in ("alpha", "beta", "天气", "x-y", "alpha beta"):
            wanted = {
                conversation.id
                for conversation in talks
                if any(
                    all(part in node.message.content for part in word.split())
                    for node in conversation.nodes.values()
                )
            }
            assert {hit.summary.id for hit in history.search(word)} == wanted
