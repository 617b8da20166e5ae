"""The real program, the real engine, the guide: on a terminal."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from localchat.chat.conversation import Conversation
from localchat.history.store import History
from localchat.tui.app import ChatApp
from localchat.tui.launch import can_show, launch
from tests.support.terminal_program import NEVER_ENDING, PATIENCE_S, Program, endless
from tests.support.tui_stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")

Start = Callable[..., Program]
LONG = "Explain the KV cache, prefill, decode and speculation."


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    opened: list[Program] = []

    def begin(*args: str, width: int = 120, height: int = 30, editor: str = "vi") -> Program:
        opened.append(Program(tmp_path, args, width=width, height=height, editor=editor))
        return opened[-1]

    yield begin
    for program in opened:
        program.close()


def kept(data: Path) -> Conversation:
    """The last conversation, as it lies on the disk."""
    with History.open(data / "history.sqlite3") as history:
        last = history.last()
        assert last is not None
        return history.load(last.id)


def states(data: Path) -> list[str]:
    """Of the messages of its shown path; empty before it is kept."""
    with History.open(data / "history.sqlite3") as history:
        last = history.last()
        return [node.state for node in history.load(last.id).path()] if last is not None else []


def ends_so(data: Path, count: int, state: str) -> bool:
    """Whether there are so many messages, the last in this state."""
    found = states(data)
    return len(found) == count and found[-1] == state


def history(data: Path, *args: str) -> Any:
    """Output of `localchat history …`."""
    done = subprocess.run(
        [sys.executable, "-m", "localchat", "history", *args, "--json"],
        env={**os.environ, "LOCALCHAT_DATA_DIR": str(data)},
        capture_output=True,
        check=True,
    )
    return json.loads(done.stdout)


_STATUS = re.compile(
    r"ready +TTFT ([\d.]+) s +([\d.]+) tok/s .*?KV ([\d,]+)/([\d,]+) .*?(?:drafts (\d+)/(\d+)|llamacpp)"
)
_FOOTER = re.compile(r"TTFT ([\d.]+) s · ([\d.]+) tok/s")


def figures_of(record: Any) -> tuple[str, ...]:
    """TTFT, tok/s, KV used and in all, drafts accepted and made, of a message as JSON has it."""
    done = record["figures"]["done"]
    timings, drafts = done["timings"], done["speculation"]
    return (
        *(f"{timings['ttft_s']:.2f}", f"{timings['decode_tokens_per_s']:.1f}"),
        *(f"{done['kv_used_tokens']:,}", f"{done['kv_total_tokens']:,}"),
        *(str(drafts.get("accepted", 0)), str(drafts.get("drafted", 0))),
    )


def shown_figures(
    program: Program, before: tuple[tuple[str, ...], ...] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The same on the screen, once an answer is over: of the status line and of the line below the answer.

    `before`: those of the last answer, which stay for a moment."""
    found: list[tuple[str, ...]] = []

    def agree() -> bool:  # a frame may be drawn in part
        status, footer = _STATUS.search(program.text), _FOOTER.search(program.text)
        found[:] = [status.groups("0"), footer.groups("0")] if status and footer else []
        return bool(found) and found[0][:2] == found[1] and found[0] not in before

    program.until(agree)
    return found[0], found[1]


def test_ask_stop_regenerate_quit_and_resume(tmp_path: Path, start: Start) -> None:
    program = start("-o", "temperature", "0", width=140)
    program.see("talking to the built-in guide")
    program.ask("What is localchat?")
    first = shown_figures(program)
    program.type("\x1b[15~")  # F5: again
    program.see("‹ 2/2 ›")
    second = shown_figures(program, first)
    program.type("\x0f")  # Ctrl+O
    program.see("TPOT p50")
    program.type("\x0f")
    program.type("\x1bOR")  # F3: the models, each with its verdict
    program.see("guide")
    program.until(lambda: re.search(r"fits: [\d.]+ [kMG]B with", program.text))
    program.type("\x1b")
    program.until(lambda: "╭─ Models" not in program.text)
    program.ask(f"/set logit_bias {NEVER_ENDING}")
    program.ask(LONG)
    program.until(lambda: "● writing" in program.text)
    program.type("\x1b")
    program.until(lambda: "● ready" in program.text)
    program.type("\x04")
    assert program.end() == 0
    assert b"\x1b[?1049l" in program.raw[-400:], "the terminal is as it was"

    path = kept(tmp_path).path()
    assert [node.message.role for node in path] == ["user", "assistant"] * 2
    assert (path[1].state, path[3].state) == ("whole", "stopped")
    stored = history(tmp_path, "export", kept(tmp_path).id)["messages"]
    answers = [each for each in stored if each["role"] == "assistant"]
    assert len(answers) == 3
    assert first == (figures_of(answers[0]), figures_of(answers[0])[:2])
    assert second == (figures_of(answers[1]), figures_of(answers[1])[:2])
    assert answers[1]["figures"]["done"]["speculation"] == {"off": "off at temperature 0"}

    again = start("-c", width=140)
    again.until(lambda: _FOOTER.search(again.text))
    assert next(_FOOTER.finditer(again.text)).groups("0") == figures_of(answers[1])[:2]
    again.see("stopped")
    again.ask("hello again")
    again.until(lambda: len(kept(tmp_path).path()) == 6 and "● ready" in again.text)
    again.type("\x03")
    again.see("Ctrl+C again to quit")
    again.type("\x03\x03")  # two: that of before is forgotten after two seconds
    assert again.end() == 0
    assert kept(tmp_path).path()[-1].state == "whole"


def test_what_outgrows_the_context_is_not_sent_until_a_way_on_is_taken(
    tmp_path: Path, start: Start
) -> None:
    program = start("--max-tokens", "8", "--temperature", "0")
    program.see("● ready")
    paste = "the KV cache keeps the keys and values\r" * 180
    for number in range(3):
        program.type(f"\x1b[200~{paste}\x1b[201~")
        program.until(lambda: "⟦paste" in program.composer)
        program.type("what is it?")
        program.until(lambda: "what is it?" in program.composer)
        program.type("\r")
        if number < 2:
            program.until(partial(ends_so, tmp_path, 2 * number + 2, "length"))
            program.see("● ready")
    program.see("nothing was sent")
    program.see("Alt+1  leave out the oldest")
    refused = [
        "whole",
        "length",
        "whole",
        "length",
        "whole",
    ]  # the question is kept, without an answer
    program.until(lambda: states(tmp_path) == refused)
    program.type("\x1b1")  # Alt+1
    program.until(lambda: states(tmp_path)[5:] == ["length"])
    program.see("not sent")
    program.type("\x04")
    assert program.end() == 0
    conversation = kept(tmp_path)
    assert conversation.policy.kind == "leave_out_oldest"
    records = history(tmp_path, "show", conversation.id)["messages"]
    assert not records[0]["sent"], "the oldest is left out"
    assert records[-1]["sent"]
    assert records[-1]["text"]
    done = records[-1]["figures"]["done"]
    assert done["usage"]["prompt_tokens"] < done["kv_total_tokens"] == 4096


@pytest.mark.parametrize("at_once", [True, False])
def test_a_killed_screen_keeps_the_question_and_what_had_come(
    tmp_path: Path, start: Start, at_once: bool
) -> None:
    program = start(*endless(), height=120)
    program.see("● ready")
    program.watch(LONG)
    program.ask(LONG)
    program.until(lambda: program.answer)
    if not at_once:
        program.until(lambda: ends_so(tmp_path, 2, "open"))
    program.process.send_signal(signal.SIGKILL)
    program.process.wait()
    path = kept(tmp_path).path()
    assert path[0].message.content == LONG
    begun = len(path) == 2  # of an answer whose first word is a moment old, nothing may be there
    assert begun or at_once
    if begun:
        assert path[1].state == "open"
        program.lost(path[1].message.content, killed=True)  # what is there is what was seen
    again = start("-c")
    again.see(LONG[:40])
    again.see("interrupted" if begun else "")


def test_a_killed_engine_is_a_notice_and_the_next_question_is_answered(
    tmp_path: Path, start: Start
) -> None:
    program = start(*endless(), height=120)
    program.see("● ready")
    program.watch(LONG)
    program.ask(LONG)
    program.until(lambda: len(program.answer) > 20)
    program.engine.kill()
    program.see("SIGKILL")
    program.see("1 try again")
    program.look_away()
    program.until(lambda: states(tmp_path) == ["whole", "failed"])
    assert program.lost(kept(tmp_path).path()[-1].message.content)[1] == 0
    program.ask("/set max_tokens 8")
    program.see("max_tokens = 8")
    program.type("\x1b1")  # Alt+1
    program.until(lambda: states(tmp_path)[1:] == ["length"])
    program.process.send_signal(signal.SIGTERM)
    assert program.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_before_the_screen_stands_leaves_the_terminal_as_it_was(
    start: Start, number: signal.Signals
) -> None:
    program = start()
    before = program.modes
    program.until(lambda: program.modes != before)
    program.process.send_signal(number)
    assert program.end() == (130 if number == signal.SIGINT else 0)
    assert program.modes == before
    assert program.raw.rindex(b"\x1b[?1049l") > program.raw.rindex(b"\x1b[?1049h")


def test_a_terminal_that_is_closed_before_the_screen_stands_takes_the_program_with_it(
    start: Start,
) -> None:
    program = start()
    before = program.modes
    program.until(lambda: program.modes != before)
    program.hang_up()
    assert program.process.wait(PATIENCE_S) == 0


def test_an_editor_is_interrupted_alone(tmp_path: Path, start: Start) -> None:
    script = tmp_path / "editor.sh"
    script.write_text(
        "#!/bin/sh\ntrap \"echo caught > '$1'; exit 0\" INT\necho edit\nsleep 60 & wait\n"
    )
    script.chmod(0o755)
    program = start(editor=str(script))
    program.see("talking to the built-in guide")
    program.type("\x07")  # Ctrl+G
    program.see("edit")
    program.type("\x03")
    program.until(lambda: "caught" in program.composer)
    program.type("\x11")
    assert program.end() == 0


def test_the_screens_signals_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl+Z while the last words are written stops the program as any other."""
    numbers = (signal.SIGTSTP, signal.SIGCONT, signal.SIGTERM, signal.SIGHUP)

    def run(app: ChatApp) -> int:
        for number in numbers:
            signal.signal(number, lambda number, frame: None)  # as Textual's driver does
        return 0

    monkeypatch.setattr(ChatApp, "run", run)
    stage = Stage(tmp_path)
    app = stage.app()
    before = [signal.getsignal(number) for number in numbers]
    assert launch(app.session.context, app.session.setup, Conversation()) == 0
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize(
    ("shown", "kept"), [((True, True, True), True), ((True, True, False), False)]
)
def test_it_draws_only_where_all_three_streams_are_a_terminal(
    monkeypatch: pytest.MonkeyPatch, shown: tuple[bool, ...], kept: bool
) -> None:
    for name, terminal in zip(("stdin", "stdout", "stderr"), shown, strict=True):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        monkeypatch.setattr(sys, name, stream)
    assert can_show({"TERM": "xterm"}) is kept
