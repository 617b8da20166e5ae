"""A conversation by lines: when it outgrows the context, and its commands."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from localchat.config.paths import find_paths
from localchat.config.settings import Settings
from localchat.documents.library import DocumentLibrary
from localchat.engine.events import Accepted, Done, Event, Finished, Text
from localchat.engine.remote.engine import RemoteEngine, RemoteOptions
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.stream import Stream
from localchat.errors import EngineDied, HistoryUnusable, NetworkError, UsageError
from localchat.history.autosave import Autosave
from localchat.history.store import History
from tests.support.cli_program import DONE
from tests.support.line_mode import Talk, TightEngine, talk_by_lines
from tests.support.media import png
from tests.support.remote_server import Exchange, Server, piece
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

Run = Callable[..., Talk]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    opened: list[History] = []

    def go(lines: Sequence[str], **options: Any) -> Talk:
        talk = talk_by_lines(lines, capfd, **options)
        opened.append(talk.history)
        return talk

    yield go
    for history in opened:
        history.close()


LONG = [f"question {number} " + "x" * 300 for number in range(5)]


def test_nothing_is_cut_before_a_choice_and_the_question_waits_for_it(run: Run) -> None:
    talk = run([*LONG, "1"])
    assert "the conversation has 1,6" in talk.shown
    assert "nothing was sent" in talk.shown
    assert "1. leave out the oldest 4 messages (" in talk.shown
    assert "2. let the model summarize" in talk.shown
    assert "4 messages, 6" in talk.shown
    assert len(talk.engine.requests) == 5
    assert talk.sent(4)[0] == LONG[2]
    assert talk.sent(4)[-1] == LONG[4]
    (kept,) = talk.conversations
    assert len(kept.path()) == 10
    assert kept.policy.kind == "leave_out_oldest"
    assert len(kept.policy.left_out) == 4


def test_the_choice_is_kept_and_applied_again_with_a_word_about_it(run: Run) -> None:
    talk = run([*LONG, "1"])
    talk = run(LONG, conversation=talk.conversations[0])
    assert "nothing was sent" not in talk.shown
    assert "messages, " in talk.shown
    assert "not sent" in talk.shown
    (kept,) = talk.conversations
    assert len(kept.path()) == 20
    assert len(kept.policy.left_out) > 4


def test_a_summary_is_written_shown_and_sent_instead(run: Run) -> None:
    talk = run([*LONG, "2"])
    assert "this summary is sent instead of" in talk.shown
    (kept,) = talk.conversations
    summary = next(node for node in kept.nodes.values() if node.replaces)
    assert summary.message.content == "Hello."
    assert talk.sent(-1)[0].startswith("Summary of the conversation so far:\n\nHello.")
    assert talk.sent(-1)[-1].endswith(LONG[4])
    assert kept.path()[-1].message.role == "assistant"


def test_another_question_instead_of_a_choice_is_a_question(run: Run) -> None:
    talk = run([*LONG, "short"])
    assert talk.sent(-1)[-1] == "short"
    assert talk.history.draft(talk.conversations[0].id) == LONG[4]
    talk = run(["1", "2"])
    assert [talk.sent(0), talk.sent(1)[-1]] == [["1"], "2"]


def test_a_question_that_was_not_sent_waits_for_the_next_start(run: Run) -> None:
    talk = run(LONG)
    (kept,) = talk.conversations
    assert talk.history.draft(kept.id) == LONG[4]
    talk = run(["/send"], conversation=kept, engine=TightEngine(context_tokens=9000))
    assert f"not sent yet: {LONG[4][:40]}" in talk.shown
    assert talk.sent(0)[-1] == LONG[4]
    assert talk.history.draft(kept.id) == ""
    assert "there is no unsent question" in run(["/send"], conversation=kept).shown


def test_a_first_question_that_is_too_long_gets_advice(run: Run) -> None:
    talk = run(["x" * 2000])
    assert "shorten the input by" in talk.shown
    assert talk.conversations == []


def test_an_engine_that_cannot_count_gets_advice_and_no_cut(run: Run) -> None:
    class Blind(TightEngine):
        def tokenize(self, text: str, *, special: bool = False) -> list[int]:
            raise UsageError("this server does not tokenize")

    for conversation in (None, run([*LONG, "1"]).conversations[0]):
        talk = run(LONG, engine=Blind(context_tokens=1500), conversation=conversation)
        assert "shorten the input by" in talk.shown
        assert "or start a new conversation: /clear" in talk.shown
        assert "tokens not sent" not in talk.shown


def test_everything_can_be_sent_again(run: Run) -> None:
    for choice in ("1", "2"):
        talk = run([*LONG, choice, "/everything", "short"])
        assert talk.shown.count("nothing was sent") == 2
        conversation = talk.conversations[0]
        assert len(conversation.path()) == 10
        assert not any(node.replaces for node in conversation.path())


def test_the_history_is_listed_with_the_way_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write = History.write

    def write_slowly(history: History, *rows: Any) -> None:
        time.sleep(0.3)
        write(history, *rows)

    monkeypatch.setattr(History, "write", write_slowly)
    talk = run(["What is a cache?", "/history"])
    (kept,) = talk.conversations
    assert f"{kept.id[:12]}  What is a cache?" in talk.shown
    assert "--conversation ID continues one" in talk.shown
    assert "no conversations yet" in run(["/history"], settings=Settings(history=False)).shown


def test_undo_and_regen_keep_what_they_leave(run: Run) -> None:
    talk = run(["one", "two", "/undo", "three", "/regen"])
    assert talk.sent(2) == ["one", "Hello.", "three"]
    assert talk.sent(3) == talk.sent(2)
    (kept,) = talk.conversations
    assert len(kept.nodes) == 7
    assert [node.message.content for node in kept.path()] == ["one", "Hello.", "three", "Hello."]
    assert len(kept.siblings(kept.path()[-1].id)) == 2


def test_a_regeneration_that_fails_leaves_the_answer_shown(run: Run) -> None:
    answers = [ScriptedAnswer(), ScriptedAnswer(pieces=(), error=EngineDied("gone"))]
    talk = run(["one", "/regen"], engine=ScriptedEngine(lambda request: answers.pop(0)))
    (kept,) = talk.conversations
    assert [node.message.content for node in kept.path()] == ["one", "Hello."]
    talk = run(["/regen"], conversation=kept, engine=TightEngine(context_tokens=1))
    assert kept.path()[-1].message.content == "Hello."


def test_commands_without_a_question_say_so(run: Run) -> None:
    talk = run(
        [
            "/undo",
            "/regen",
            "/compact",
            "/stats",
            "/export",
            "/nonsense",
            "/set a",
            "/system",
            "/help",
        ]
    )
    for words in (
        "there is nothing to undo",
        "there is no question to answer again",
        "there is nothing to summarize",
        "There are no metrics of an answer yet.",
        "there is nothing to export",
        "there is no command /nonsense",
        "/set is a command of the screen",
        "continue with a flag, such as: localchat -c -i --temp 0.2",
        "There are no instructions.",
        "Leave, as /quit does.",
    ):
        assert words in talk.shown


def test_the_help_is_one_table_and_promises_nothing_of_the_screen(run: Run) -> None:
    lines = run(["/help"]).shown.splitlines()
    rows = [line for line in lines if line.startswith(("/", '"""', "Ctrl+"))]
    assert len({re.search(r"  +(?=[A-Z])", row).end() for row in rows}) == 1  # type: ignore[union-attr]
    assert not any("panel" in row or "rename" in row for row in rows)


def test_an_unknown_command_names_those_of_the_line_mode(run: Run) -> None:
    shown = run(["/qqqqqq"]).shown
    assert "there is no command /qqqqqq" in shown
    assert "valid names: /clear, /compact, /everything, /export, /help, " in shown
    assert "model" not in shown


def test_a_tool_server_that_does_not_start_is_reported_once(run: Run) -> None:
    settings_file = find_paths({}).settings_file
    settings_file.parent.mkdir(parents=True, exist_ok=True)
    settings_file.write_text('[mcp.broken]\ncommand = "/nowhere/program"\n')
    shown = run(["hi", "and now?"], settings=Settings(tools="broken")).shown
    assert shown.count("MCP server broken: there is no program") == 1


def test_an_unknown_name_of_documents_is_noticed(run: Run) -> None:
    shown = run(["@lease when does it end?"]).shown
    assert "there are no documents @lease, so the name is sent as text" in shown


def test_an_answer_that_is_stopped_before_its_first_word_has_no_text_to_keep(run: Run) -> None:
    class Stopping(TightEngine):
        def generate(self, request: GenerateRequest) -> Stream:
            stream = super().generate(request)
            signal.raise_signal(signal.SIGINT)
            return stream

    answer = ScriptedAnswer(pieces=(), events=(Accepted(1, 2, 9), Finished(0, "cancelled"), DONE))
    talk = run(["one"], engine=Stopping(lambda request: answer, context_tokens=1500))
    assert "stopped before the first token" in talk.shown
    assert "the text so far" not in talk.shown


def test_a_named_picture_is_attached_with_a_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "chart.png"
    file.write_bytes(png())
    talk = run([f"@{file} what is odd?", f"and in {file}"])
    assert talk.shown.count("chart.png is attached (6x4)") == 2
    prompts = [request.prompt for request in talk.engine.requests]
    messages = [prompt.messages[-1] for prompt in prompts if isinstance(prompt, Messages)]
    assert [message.content for message in messages] == ["what is odd?", "and in"]
    assert [item.position for message in messages for item in message.attachments] == [0, 6]


def test_a_named_file_is_included_with_a_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("1\n")
    Path("a.png").write_bytes(png())
    talk = run(["what is in @a.txt?", "@a.png and @a.txt"])
    assert talk.shown.count("a.txt is attached") == 2
    assert talk.sent(0) == ["a.txt:\n\n1\n\nwhat is in @a.txt?"]
    assert talk.sent(1)[-1] == "a.txt:\n\n1\n\nand @a.txt"
    prompt = talk.engine.requests[1].prompt
    assert isinstance(prompt, Messages)
    assert [item.position for item in prompt.messages[-1].attachments] == [11]


def test_a_refused_question_does_not_end_the_conversation(run: Run) -> None:
    with DocumentLibrary(find_paths({}).data_dir / "documents").open("home", create=True):
        pass
    talk = run(["@hom when?", "two"])
    assert "there are no documents @hom; did you mean @home?" in talk.shown
    assert [talk.sent(number) for number in range(len(talk.engine.requests))] == [["two"]]


def test_a_conversation_that_cannot_be_saved_is_not_left_and_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = HistoryUnusable("the disk is full")

    def flush(save: Autosave, timeout_s: float = 0.0) -> None:
        if save._conversation.nodes:
            raise problem

    monkeypatch.setattr(Autosave, "flush", flush)
    talk = run(["one", "/new", "two"])
    assert talk.sent(1) == ["one", "Hello.", "two"]
    assert talk.shown.count("the disk is full") == 2


def test_a_path_at_the_beginning_is_text(run: Run) -> None:
    talk = run(["/usr/lib/x.py:3: error: it broke"])
    assert talk.sent(0) == ["/usr/lib/x.py:3: error: it broke"]


def test_clear_begins_another_conversation_with_the_same_instructions(run: Run) -> None:
    talk = run(["/system be brief", "one", "/clear", "two"])
    assert talk.sent(1) == ["be brief", "two"]
    assert [one.path()[0].message.content for one in talk.conversations] == ["two", "one"]
    assert [one.system for one in talk.conversations] == ["be brief", "be brief"]


def test_export_writes_a_file_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, text = tmp_path / "talk.json", tmp_path / "talk.md"
    talk = run(["one", f"/export {whole}", f"/export {text}", f"/export {text}"])
    assert json.loads(whole.read_text())["messages"][1]["text"] == "Hello."
    assert "## User\n\none\n" in text.read_text()
    assert "already exists" in talk.shown
    monkeypatch.chdir(tmp_path)
    assert "cannot write" in run(["one", f"/export {'x' * 300}"]).shown
    shown = run(["one", "/export ~nobody-of-this-name"]).shown
    assert f"Written to {tmp_path / '~nobody-of-this-name'}." in shown
    assert f"Written to {tmp_path / 'one.md'}." in run(["one", "/export"]).shown
    assert "## User\n\none\n" in (tmp_path / "one.md").read_text()


def test_a_question_that_was_refused_leaves_no_trace(run: Run) -> None:
    engine = ScriptedEngine(
        lambda request: ScriptedAnswer(pieces=(), error=UsageError("bad template"))
    )
    talk = run(["one"], engine=engine)
    assert "bad template" in talk.shown
    assert talk.conversations == []


def test_an_engine_that_dies_leaves_what_it_said_and_the_next_question_is_answered(
    run: Run,
) -> None:
    died = EngineDied("the engine died: SIGKILL")
    answers = [ScriptedAnswer(pieces=("half",), error=died), ScriptedAnswer(pieces=("whole",))]
    engine = ScriptedEngine(lambda request: answers.pop(0))
    talk = run(["one", "two"], engine=engine)
    (kept,) = talk.conversations
    assert [(node.message.content, node.state) for node in kept.path()] == [
        ("one", "whole"),
        ("half", "failed"),
        ("two", "whole"),
        ("whole", "whole"),
    ]
    assert kept.path()[1].error == "the engine died: SIGKILL"


def test_a_question_that_did_not_reach_its_server_is_kept_and_can_be_sent(run: Run) -> None:
    lost = NetworkError("the connection failed", hint="is the server running?")
    answers = [ScriptedAnswer(pieces=(), error=lost), ScriptedAnswer(pieces=("there",))]
    engine = ScriptedEngine(lambda request: answers.pop(0))
    talk = run(["one", "/send"], engine=engine)
    assert "is the server running?" in talk.shown and "/send" in talk.shown
    (kept,) = talk.conversations
    assert [node.message.content for node in kept.path()] == ["one", "there"]


def test_a_remote_that_drops_in_the_middle_leaves_what_it_said(run: Run) -> None:
    pieces = iter([piece(content="half"), piece("stop", content="whole")])

    def answer(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.send(404, {})
        else:
            exchange.stream(next(pieces), end=False)

    server = Server(answer)
    engine = RemoteEngine(RemoteOptions(server.url, "m"), notify=lambda sentence: None)
    try:
        talk = run(["one", "two"], engine=engine)
    finally:
        engine.close()
        server.stop()
    (kept,) = talk.conversations
    assert [(node.message.content, node.state) for node in kept.path()] == [
        ("one", "whole"),
        ("half", "failed"),
        ("two", "whole"),
        ("whole", "whole"),
    ]
    assert "the partial answer is kept" in talk.shown


def test_without_a_history_nothing_is_written(run: Run) -> None:
    talk = run(["one"], settings=Settings(history=False))
    assert talk.conversations == []


def test_a_stopped_summary_changes_nothing(run: Run) -> None:
    class Stopping(TightEngine):
        def generate(self, request: GenerateRequest) -> Stream:
            if request.max_tokens is not None:
                raise KeyboardInterrupt
            return super().generate(request)

    talk = run([*LONG, "2"], engine=Stopping(context_tokens=1500))
    (kept,) = talk.conversations
    assert not any(node.replaces for node in kept.nodes.values())


def test_figures_are_those_that_the_engine_told(run: Run) -> None:
    events: tuple[Event, ...] = (Accepted(1, 2, 9), Text(0, "hi"), Finished(0, "length"), DONE)
    talk = run(["one"], engine=ScriptedEngine(lambda request: ScriptedAnswer(events=events)))
    answer = talk.conversations[0].path()[-1]
    assert answer.state == "length"
    assert answer.metrics is not None
    assert answer.metrics.draw_seed == 9
    assert isinstance(answer.metrics.done, Done)
