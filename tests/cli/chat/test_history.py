"""Conversations on the command line: kept, gone on with, listed, searched, exported."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localchat.cli.chat.conversation_options import HISTORY_FILE
from localchat.cli.chat.one_shot import OneShot
from localchat.config.paths import find_paths
from localchat.engine.request import Message, Messages
from tests.support.cli_program import DONE, SCENARIOS, ScriptedApp
from tests.support.terminal_screen import Call, Screen


def conversations(call: Call) -> list[dict[str, Any]]:
    found = json.loads(call((), "history", "list", "--json").out)
    assert isinstance(found, list)
    return found


def shown(call: Call, *args: str) -> dict[str, Any]:
    record = json.loads(call((), "history", "show", *args, "--json").out)
    assert isinstance(record, dict)
    return record


def test_a_one_shot_is_kept_with_its_figures(call: Call) -> None:
    assert call(SCENARIOS["thinks"], "-s", "be brief", "is it so?").code == 0
    (summary,) = conversations(call)
    assert summary["title"] == "is it so?"
    record = shown(call, str(summary["id"])[:12])
    assert record["system"] == "be brief"
    question, answer = record["messages"]
    assert (question["role"], question["text"]) == ("user", "is it so?")
    assert (answer["text"], answer["reasoning"], answer["state"]) == ("Yes", "hm so", "whole")
    figures = answer["figures"]
    assert figures["model"] == "tiny"
    assert figures["draw_seed"] == 7
    assert figures["done"]["timings"]["decode_tokens_per_s"] == DONE.timings.decode_tokens_per_s
    assert figures["done"]["usage"]["prompt_tokens"] == 12


def test_a_question_about_piped_text_and_files_gives_the_title(call: Call, tmp_path: Path) -> None:
    note = tmp_path / "a.txt"
    note.write_text("one\n")
    assert call(SCENARIOS["hello"], "-f", note, "find the bug", stdin=b"def f():\n").code == 0
    (summary,) = conversations(call)
    assert summary["title"] == "find the bug"
    question = shown(call, str(summary["id"])[:12])["messages"][0]
    (inclusion,) = question["inclusions"]
    assert inclusion == {"label": f"{note}, stdin", "start": 0, "end": len("one\n\ndef f():")}
    assert call(SCENARIOS["hello"], stdin=b"what is it?\n").code == 0
    assert conversations(call)[0]["title"] == "what is it?"


@pytest.mark.parametrize("flag", ["--no-history", "LOCALCHAT_HISTORY"])
def test_nothing_is_kept_where_nothing_shall_be(
    call: Call, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flag.startswith("--"):
        call(SCENARIOS["hello"], flag, "hi")
    else:
        monkeypatch.setenv(flag, "false")
        call(SCENARIOS["hello"], "hi")
    assert not (find_paths({}).data_dir / "history.sqlite3").exists()


def test_a_look_at_no_history_leaves_no_file(call: Call) -> None:
    assert conversations(call) == []
    assert call((), "history", "search", "x").code == 1
    assert call(SCENARIOS["hello"], "-c", "hi").code == 2
    assert not find_paths({}).data_dir.exists()


def test_an_empty_history_is_said_on_stderr(call: Call) -> None:
    said = call((), "history")
    assert (said.code, said.out) == (0, "")
    assert "no conversations yet" in said.err
    assert call((), "history", "--json").out == "[]\n"


def test_without_history_a_conversation_can_be_read_and_is_not_written(call: Call) -> None:
    call(SCENARIOS["hello"], "first one")
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "--no-history", "-c", "second").code == 0
    prompt = app.engines[0].requests[0].prompt
    assert isinstance(prompt, Messages)
    assert len(prompt.messages) == 3
    assert [one["messages"] for one in conversations(call)] == [2]


def test_continue_sends_what_was_said_and_adds_to_it(call: Call) -> None:
    call(SCENARIOS["hello"], "-s", "be brief", "first one")
    call(SCENARIOS["hello"], "another conversation")
    first = str(conversations(call)[-1]["id"])
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "--conversation", first[:12], "second").code == 0
    prompt = app.engines[0].requests[0].prompt
    assert isinstance(prompt, Messages)
    assert prompt.messages == (
        Message("system", "be brief"),
        Message("user", "first one"),
        Message("assistant", "Hello.\n\n"),
        Message("user", "second"),
    )
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "-c", "-s", "be long", "third").code == 0
    prompt = app.engines[0].requests[0].prompt
    assert isinstance(prompt, Messages)
    assert [m.content for m in prompt.messages if m.role != "assistant"] == [
        "be long",
        "first one",
        "second",
        "third",
    ]
    assert [one["messages"] for one in conversations(call)] == [6, 2]


def test_continue_takes_the_model_of_the_conversation_unless_one_is_named(
    call: Call, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    call(SCENARIOS["hello"], "-m", other, "hi")
    app = ScriptedApp(SCENARIOS["hello"])
    call(app, "-c", "more")
    assert app.options[0].model == other
    app = ScriptedApp(SCENARIOS["hello"])
    call(app, "-c", "-m", tmp_path / "tiny.gguf", "more")
    assert app.options[0].model == tmp_path / "tiny.gguf"
    call(SCENARIOS["hello"], "-c", "-m", other, "more")
    other.unlink()
    code, _, err = call(SCENARIOS["hello"], "-c", "more")
    assert code == 3
    assert "continue with another one: -m MODEL" in err


def test_there_must_be_something_to_go_on_with(call: Call) -> None:
    assert call(SCENARIOS["hello"], "-c", "hi").code == 2
    assert call(SCENARIOS["hello"], "--conversation", "ffff", "hi").code == 2
    call(SCENARIOS["hello"], "hi")
    named = ("--conversation", str(conversations(call)[0]["id"]))
    short = call(SCENARIOS["hello"], "--conversation", named[1][:3], "hi")
    assert (short.code, "is too short for the id" in short.err) == (2, True)
    assert call(SCENARIOS["hello"], "-c", *named, "hi").code == 2
    assert call(SCENARIOS["hello"], *named, "hi").code == 0


def test_an_answer_that_fails_keeps_what_was_said_and_why(call: Call) -> None:
    assert call(SCENARIOS["dies"], "hi").code == 1
    answer = shown(call, str(conversations(call)[0]["id"]))["messages"][1]
    assert (answer["text"], answer["state"]) == ("half an ans", "failed")
    assert "SIGKILL" in answer["error"]


def test_a_refused_question_and_a_raw_prompt_are_not_kept(call: Call) -> None:
    assert call(SCENARIOS["long"], "hi").code == 6
    assert call(SCENARIOS["hello"], "--raw-prompt", "hi").code == 0
    assert conversations(call) == []


def test_a_question_stopped_before_the_first_token_is_not_kept(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(one_shot: OneShot, prompt: object) -> None:
        one_shot.answer.interrupted = True

    call(SCENARIOS["hello"], "question one")
    monkeypatch.setattr(OneShot, "_receive", stopped)
    assert [one["title"] for one in conversations(call)] == ["question one"]
    assert call(SCENARIOS["hello"], "question two").code == 130
    assert [one["title"] for one in conversations(call)] == ["question one"]


def test_a_large_question_is_recorded_once_it_is_accepted(call: Call) -> None:
    text = b"a long text " * 300_000
    assert call(SCENARIOS["long"], "sum up", stdin=text).code == 6
    file = find_paths({}).data_dir / HISTORY_FILE
    assert not file.exists() or file.stat().st_size < 500_000
    assert call(SCENARIOS["hello"], "sum up", stdin=text).code == 0
    (message, _) = shown(call, str(conversations(call)[0]["id"]))["messages"]
    assert len(message["text"]) > 3_000_000


def test_all_choices_are_kept_as_versions_of_one_answer(call: Call) -> None:
    call(SCENARIOS["two"], "--n", "2", "hi")
    id_ = str(conversations(call)[0]["id"])
    whole = json.loads(call((), "history", "export", id_, "--json").out)["messages"]
    assert [m["parent"] for m in whole] == [None, whole[0]["id"], whole[0]["id"]]
    assert [m["shown"] for m in whole] == [True, True, False]


def test_a_history_that_cannot_be_used_stops_no_answer(call: Call) -> None:
    (find_paths({}).data_dir / "history.sqlite3").mkdir(parents=True)
    code, out, err = call(SCENARIOS["hello"], "hi")
    assert (code, out) == (0, "Hello.\n")
    assert "not saved" in err
    assert call((), "history", "list").code == 1


def test_a_history_on_a_full_disk_is_listed_shown_and_continued(call: Call) -> None:
    call(SCENARIOS["hello"], "is it so?")
    # This prevents SQLite's index of the log, as a full or read-only disk does, also for root.
    Path(f"{find_paths({}).data_dir / HISTORY_FILE}-shm").symlink_to("/nonexistent/file")
    (summary,) = conversations(call)
    assert "is it so?" in call((), "history", "show", str(summary["id"])).out
    continued = call(SCENARIOS["hello"], "-c", "and now?")
    assert continued.code == 0
    assert "this conversation is not saved" in continued.err
    assert call((), "history", "rename", str(summary["id"]), "another title").code == 1


def test_list_search_rename_rm_restore(call: Call) -> None:
    call(SCENARIOS["hello"], "where is the café?")
    call(SCENARIOS["hello"], "something else")
    id_ = str(conversations(call)[1]["id"])
    out = call((), "history", "list").out
    assert out.splitlines()[0].split() == ["ID", "LAST", "MESSAGES", "TITLE"]
    assert id_[:12] in out
    code, out, _ = call((), "history", "search", "cafe")
    assert code == 0
    assert "where is the café?" in out
    (hit,) = json.loads(call((), "history", "search", "--json", "cafe").out)
    assert hit["id"] == id_
    assert hit["marks"] == [[13, 17]]
    nothing = call((), "history", "search", "nowhere")
    assert (nothing.code, nothing.out) == (1, "")
    assert "no conversation contains 'nowhere'" in nothing.err
    assert call((), "history", "rename", id_[:12], "about", "coffee").code == 0
    assert "about coffee" in call((), "history", "list").out
    assert call((), "history", "rm", id_).code == 2
    code, _, err = call((), "history", "rm", "-y", id_)
    assert code == 0
    assert f"history restore {id_[:12]}\n" in err
    assert len(conversations(call)) == 1
    restored = call((), "history", "restore", id_[:12])
    assert restored.code == 0
    assert "restored 'about coffee' (2 messages)" in restored.err
    assert len(conversations(call)) == 2


def test_export_writes_markdown_and_json_and_replaces_nothing(call: Call, tmp_path: Path) -> None:
    call(SCENARIOS["thinks"], "is it so?")
    id_ = str(conversations(call)[0]["id"])
    out = call((), "history", "export", id_).out
    assert out.startswith("# is it so?\n")
    assert "## User\n\nis it so?\n\n## Assistant\n\n> *Reasoning:*\n>\n> hm so\n\nYes\n" in out
    assert "62.0 tok/s" in out
    file = tmp_path / "talk.json"
    assert call((), "history", "export", id_, "-o", file).code == 0
    assert json.loads(file.read_text())["messages"][1]["text"] == "Yes"
    assert call((), "history", "export", id_, "-o", file).code == 2
    assert call((), "history", "export", id_, "-o", file, "--force").code == 0
    assert call((), "history", "show", "ffff").code == 2


def test_ctrl_c_in_a_conversation_keeps_the_answer_as_stopped(
    screen: Callable[..., Screen], call: Call
) -> None:
    one = screen("slow", "-i", "go")
    one.wait_for("first ")
    one.press("\x03")
    one.wait_for("stopped")
    one.wait_for("> ")
    one.press("\x04")
    assert one.finish()[0] == 0
    answer = shown(call, str(conversations(call)[0]["id"]))["messages"][1]
    assert (answer["text"], answer["state"]) == ("first ", "stopped")


def test_a_conversation_goes_on_by_lines(screen: Callable[..., Screen], call: Call) -> None:
    call(SCENARIOS["hello"], "first one")
    one = screen("hello", "-c", "-i")
    one.wait_for("continuing 'first one', 2 messages")
    one.wait_for("> ")
    one.press("second\n")
    one.wait_for("Hello.")
    one.wait_for("> ")
    one.press("/undo\n")
    one.wait_for("2 messages left")
    one.wait_for("> ")
    one.press("third\n")
    one.wait_for("Hello.")
    one.wait_for("> ")
    one.press("/regen\n")
    one.wait_for("Hello.")
    one.wait_for("> ")
    one.press("\x04")
    assert one.finish()[0] == 0
    (summary,) = conversations(call)
    record = shown(call, str(summary["id"]))
    assert [m["text"] for m in record["messages"]][::2] == ["first one", "third"]
    assert summary["messages"] == 7


def test_undone_messages_are_not_continued_and_can_still_be_shown(
    screen: Callable[..., Screen], call: Call
) -> None:
    call(SCENARIOS["hello"], "first one")
    one = screen("hello", "-c", "-i")
    one.wait_for("continuing 'first one', 2 messages")
    one.wait_for("> ")
    one.press("/undo\n")
    one.wait_for("0 messages left")
    one.wait_for("> ")
    one.press("\x04")
    assert one.finish()[0] == 0
    (summary,) = conversations(call)
    assert shown(call, str(summary["id"]))["messages"][0]["text"] == "first one"
    app = ScriptedApp(SCENARIOS["hello"])
    call(app, "-c", "second")
    prompt = app.engines[0].requests[0].prompt
    assert isinstance(prompt, Messages)
    assert [message.content for message in prompt.messages] == ["second"]
    assert shown(call, str(summary["id"]))["messages"][0]["text"] == "second"


def test_a_conversation_that_was_killed_shows_what_was_said(
    screen: Callable[..., Screen], call: Call
) -> None:
    """Killed once the answer is on the disk, which it is while it still comes."""
    one = screen("slow", "-i", "go")
    one.wait_for("first ")
    end = time.monotonic() + 90
    while [found["messages"] for found in conversations(call)] != [2]:
        assert time.monotonic() < end, "nothing comes to the disk"
    one.process.kill()
    one.process.wait()
    id_ = str(conversations(call)[0]["id"])
    answer = shown(call, id_)["messages"][1]
    assert (answer["text"], answer["state"]) == ("first ", "open")
    assert "was not finished" in call((), "history", "show", id_).out
    assert call(SCENARIOS["hello"], "-c", "and now?").code == 0


def test_a_shell_completes_ids_with_their_titles(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_WORDS", "localchat --conversation ")
    monkeypatch.setenv("COMP_CWORD", "2")
    monkeypatch.setenv("_LOCALCHAT_COMPLETE", "zsh_complete")
    assert call(()).out.strip() == ""
    monkeypatch.delenv("_LOCALCHAT_COMPLETE")
    call(SCENARIOS["hello"], "what is\ta fnord")
    id_ = str(conversations(call)[0]["id"])
    monkeypatch.setenv("_LOCALCHAT_COMPLETE", "zsh_complete")
    assert call(()).out.split("\n")[:3] == ["plain", id_, "what is a fnord"]
    for words in ("localchat run m --conversation ", "localchat history show "):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
        assert id_ in call(()).out


def test_a_list_that_is_cut_says_so(call: Call) -> None:
    for n in range(3):
        call(SCENARIOS["hello"], f"question {n}")
    cut = call((), "history", "list", "-n", "2")
    assert len(cut.out.splitlines()) == 3
    assert cut.err == "", "who gives a limit knows that there may be more"
    assert not call((), "history", "list", "-n", "3").err
    cut = call((), "history", "search", "-n", "2", "question")
    assert len(cut.out.splitlines()) == 4
    assert "there are more than 2 matches; -n shows more" in cut.err
    assert not call((), "history", "search", "question").err


@pytest.mark.parametrize("verb", [("list",), ("search", "x")])
def test_a_limit_that_nothing_can_reach_is_refused(call: Call, verb: tuple[str, ...]) -> None:
    refused = call((), "history", *verb, "-n", "1" + "0" * 20)
    assert (refused.code, "is not in the range" in refused.err) == (2, True)
