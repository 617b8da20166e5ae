"""One prompt with tools on the command line: who is asked, what is printed, what --json has."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localchat.engine.events import Finished, Text, ToolCall
from localchat.engine.request import Messages
from tests.support.cli_program import BEGIN, DONE, ScriptedApp, answer
from tests.support.paths import ROOT
from tests.support.terminal_screen import Call, Screen

LOOKS = (
    *BEGIN,
    Text(0, "Looking."),
    ToolCall(0, 0, "call_1", "read_file", '{"path": "a.txt"}'),
    Finished(0, "tool_calls"),
    DONE,
)
"""The scripted engine answers every request like this."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("alpha\n")
    return folder


def test_calls_are_lines_on_stderr_and_the_answer_is_alone_on_stdout(
    call: Call, folder: Path
) -> None:
    app = ScriptedApp(LOOKS)
    flags = ("--tools", "read", "--root", folder, "--yes", "--tool-rounds", "1")
    code, out, err = call(app, *flags, "What is in a.txt?")
    assert code == 0
    assert out == "Looking.\nLooking.\n"
    assert "◆ read_file a.txt, from line 1 · done · " in err
    first, second = app.engines[0].requests
    assert isinstance(first.prompt, Messages)
    assert first.prompt.tool_choice == "auto"
    assert isinstance(second.prompt, Messages)
    assert second.prompt.tool_choice == "none"
    assert second.prompt.messages[-1].content.startswith("alpha")


def test_json_has_the_calls_with_their_results(call: Call, folder: Path) -> None:
    flags = ("--tools", "read", "--root", folder, "--yes", "--tool-rounds", "1", "--json")
    code, out, _ = call(LOOKS, *flags, "look")
    fields = json.loads(out)
    assert code == 0
    assert fields["text"] == "Looking."
    first = fields["tool_calls"][0]
    assert (first["name"], first["state"], first["characters"]) == ("read_file", "done", 5)
    assert first["result"].startswith("alpha")


def test_a_code_block_that_was_cut_is_an_error_with_tools_too(call: Call, folder: Path) -> None:
    cut = (*BEGIN, Text(0, "```\nhalf"), Finished(0, "length", limit="max_tokens"), DONE)
    outcome = call(cut, "--tools", "read", "--root", folder, "--yes", "-x", "look")
    assert (outcome.code, outcome.out) == (1, "")
    assert "The code block was not complete after" in outcome.err


def test_stats_and_a_limit_are_reported_once_with_tools(call: Call, folder: Path) -> None:
    cut = (*BEGIN, Text(0, "half"), Finished(0, "length", limit="max_tokens"), DONE)
    flags = ("--tools", "read", "--root", folder, "--yes", "--stats", "--max-tokens", "60")
    outcome = call(cut, *flags, "--require-complete", "look")
    assert (outcome.code, outcome.out) == (7, "half\n")
    assert outcome.err.count("The answer was cut at 60 tokens (--max-tokens 60)") == 1
    assert outcome.err.count("tok/s") == call(cut, "--stats", "look").err.count("tok/s")
    assert "the answer is not complete" in outcome.err


def test_a_pipe_never_consents(call: Call, folder: Path) -> None:
    flags = ("--tools", "read,edit", "--root", folder)
    outcome = call(LOOKS, *flags, "look", stdin=b"y\ny\ny\n")
    assert outcome.code == 2
    assert "--yes allows the calls that only read" in outcome.err
    writes = (
        *LOOKS[:-3],
        ToolCall(0, 0, "c", "edit_file", '{"path":"a.txt","old_text":"alpha","new_text":"x"}'),
        *LOOKS[-2:],
    )
    outcome = call(writes, *flags, "--yes", "--tool-rounds", "1", "look", stdin=b"y\n")
    assert outcome.code == 0
    assert "refused" in outcome.err
    assert (folder / "a.txt").read_text() == "alpha\n"


@pytest.mark.process
@pytest.mark.parametrize(("key", "text"), [("y", "beta\n"), ("n", "alpha\n"), ("never", "alpha\n")])
def test_the_terminal_is_asked_with_the_difference(
    screen: Callable[..., Screen], folder: Path, key: str, text: str
) -> None:
    flags = ("--tools", "edit", "--root", str(folder), "--tool-rounds", "1")
    page = screen("edits", *flags, "change it", stdin=b"y\n")
    shown = page.wait_for("Allow? (y = yes, s = all edits in this folder, n = no, never) ")
    assert "edit_file: may change a file; /undo takes it back" in shown
    assert "│ -alpha" in shown
    assert "│ +beta" in shown
    page.press("maybe\n")
    page.wait_for("Allow? ")
    page.press(f"{key}\n")
    assert page.finish()[0] == 0
    assert (folder / "a.txt").read_text() == text


@pytest.mark.process
def test_undo_in_the_line_mode_names_the_files_that_it_restores(
    screen: Callable[..., Screen], folder: Path
) -> None:
    flags = ("-i", "--tools", "edit", "--root", str(folder), "--tool-rounds", "1")
    page = screen("edits", *flags, "change it")
    page.wait_for("never) ")
    page.press("y\n")
    page.wait_for("done · ")
    page.press("/undo\n")
    page.wait_for("back before the last question")
    page.wait_for("a.txt")
    assert (folder / "a.txt").read_text() == "alpha\n"
    page.press("\x04")
    page.finish()


@pytest.mark.process
@pytest.mark.parametrize("key", ["\x03", "\x04"])
def test_an_interrupted_question_ends_its_line(
    screen: Callable[..., Screen], folder: Path, key: str
) -> None:
    flags = ("--tools", "edit", "--root", str(folder), "--tool-rounds", "1")
    page = screen("edits", *flags, "change it", stdin=b"y\n")
    page.wait_for("never) ")
    page.press(key)
    shown = page.wait_for("refused: ") + page.finish()[1]
    (line,) = (line for line in shown.splitlines() if "◆ edit_file" in line)
    assert "^C" not in line
    assert "Allow?" not in line
    assert "characters" not in line
    assert (folder / "a.txt").read_text() == "alpha\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tools", "raed"), "there are no tools 'raed'"),
        (("--tools", "read", "--n", "2"), "--n cannot be combined with tools"),
        (("--tools", "read", "--raw-prompt"), "--raw-prompt cannot be combined"),
        (("--yes",), "tools are off"),
        (("--tools", "read", "--yes", "--root", "/no/such/folder"), "cannot be used"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    call: Call, flags: tuple[str, ...], message: str
) -> None:
    outcome = call(LOOKS, *flags, *(() if "--yes" in flags else ("--yes",)), "look")
    assert outcome.code == 2
    assert message in outcome.err


def test_a_command_of_the_line_mode_keeps_the_flags(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str | None] = ["/tools read", "two", None]

    class Keyboard:
        def read(self) -> str | None:
            return lines.pop(0)

    monkeypatch.setattr("localchat.cli.chat.line_input.open_keyboard", lambda terminal: Keyboard())
    app = ScriptedApp(answer("Hello."))
    flags = ("--temperature", "0.3", "--ctx", "2048", "--root", folder)
    assert call(app, "-i", *flags, "one").code == 0
    (engine,) = app.engines
    assert [request.sampling.temperature for request in engine.requests] == [0.3, 0.3]
    assert isinstance(engine.requests[1].prompt, Messages)
    assert engine.requests[1].prompt.tools


@pytest.mark.process
def test_a_prompt_of_an_mcp_server_is_a_command_of_the_line_mode(
    screen: Callable[..., Screen], call: Call
) -> None:
    program = str(ROOT / "tests/support/mcp_server.py")
    assert call((), "config", "mcp", "add", "demo", sys.executable, program, "full").code == 0
    page = screen("hello", "-i", "--tools", "demo")
    page.wait_for("> ")
    page.press("/mcp__demo__greet_all\n")
    page.wait_for("this prompt takes WHOM [HOW]")
    page.press("/mcp__demo__wave\n")
    page.wait_for("no server in use has the prompt /mcp__demo__wave")
    page.press("/tools\n")
    page.wait_for("/mcp__demo__greet_all WHOM [HOW]  Greet.")
    page.press("/mcp__demo__greet_all Ada Good day\n")
    page.wait_for("Hello.")
    page.press("\x04")
    page.finish()
    (row,) = json.loads(call((), "history", "list", "--json").out)
    assert row["title"] == "Good day, Ada"
