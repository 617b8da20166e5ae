"""The real program, the real engine, the guide: on a terminal."""

import io
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localchat.chat.conversation import Conversation
from localchat.figures import stats_line
from localchat.history.store import History
from localchat.tui.launch import can_show
from tests.tui.program import Program

Start = Callable[..., Program]
LONG = "Explain the KV cache, prefill, decode and speculation."


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    opened: list[Program] = []

    def begin(*args: str, width: int = 120) -> Program:
        opened.append(Program(tmp_path, args, width=width))
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


def test_ask_stop_regenerate_quit_and_resume(tmp_path: Path, start: Start) -> None:
    program = start("-o", "temperature", "0", "--seed", "1")
    program.see("The guide answers")
    program.ask("What is localchat?")
    program.until(lambda: re.search(r"TTFT .* tok/s .* drafts", program.text))
    program.until(lambda: "● ready" in program.text)
    program.type("\x1b[15~")  # F5: again
    program.see("‹ 2/2 ›")
    program.until(lambda: "● ready" in program.text)
    program.type("\x0f")  # Ctrl+O
    program.see("TPOT p50")
    program.type("\x0f")
    program.type("\x1bOR")  # F3: the models, each with its verdict
    program.see("guide")
    program.until(lambda: re.search(r"guide .* fits: [\d,]+ tokens", program.text))
    program.type("\x1b")
    program.until(lambda: "╭─ Models" not in program.text)
    program.ask("/set temperature 0.1")
    program.see("temperature = 0.1")
    program.ask('/set logit_bias {"2": -100}')  # it cannot end: it is still writing when Esc comes
    program.until(lambda: "logit_bias =" in program.text)
    program.ask(LONG)
    program.until(lambda: "● writing" in program.text)
    program.type("\x1b")
    program.until(lambda: "● ready" in program.text)
    program.type("\x04")
    assert program.end() == 0
    assert b"\x1b[?1049l" in program.raw[-400:], "the terminal is as it was"

    conversation = kept(tmp_path)
    path = conversation.path()
    assert [node.message.role for node in path] == ["user", "assistant"] * 2
    assert (path[1].state, path[3].state) == ("whole", "stopped")
    assert len(conversation.siblings(path[1].id)) == 2
    assert path[1].figures is not None
    assert path[1].figures.done is not None

    again = start("-c")
    again.see(stats_line(path[1].figures.done))
    again.see("stopped")
    again.ask("hello again")
    again.until(lambda: again.text.count("● ready") and again.text.count("tok/s") >= 2)
    again.type("\x03")
    again.rest(0.2)
    again.type("\x03")
    assert again.end() == 0
    assert len(kept(tmp_path).path()) == 6


@pytest.mark.parametrize("pause_s", [0.15, 0.4])
def test_a_killed_screen_loses_a_second_at_most(
    tmp_path: Path, start: Start, pause_s: float
) -> None:
    program = start()
    program.see("● ready")
    program.ask(LONG)
    program.until(lambda: "● writing" in program.text)
    program.rest(1.0 + pause_s)
    shown = program.text
    program.process.send_signal(signal.SIGKILL)
    program.process.wait()
    time.sleep(0.1)
    path = kept(tmp_path).path()
    assert path[0].message.content == LONG
    assert len(path) == 2
    assert path[1].state in ("open", "stopped", "whole")
    first = path[1].message.content[:20].split("\n")[0].strip("*# ")
    assert first
    assert first[:10] in shown
    again = start("-c")
    again.see(LONG[:40])
    again.see("broke off" if path[1].state == "open" else "")


def test_a_killed_engine_is_a_notice_and_the_next_question_is_answered(
    tmp_path: Path, start: Start
) -> None:
    program = start()
    program.see("● ready")
    program.ask(LONG)
    program.until(lambda: "● writing" in program.text)
    program.engine.kill()
    program.see("SIGKILL")
    program.see("try again")
    program.type("\x1b1")  # Alt+1
    program.until(lambda: re.search(r"TTFT [\d.]+ s · ", program.text))
    program.until(lambda: "● ready" in program.text)
    program.process.send_signal(signal.SIGTERM)
    assert program.end() == 0
    assert kept(tmp_path).path()[-1].state == "whole"


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
