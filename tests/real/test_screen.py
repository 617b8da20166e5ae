"""The screen on a terminal, with a real model: a conversation, a paste, and the list of models."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from localchat.chat.conversation import Conversation
from localchat.history.store import History
from tests.support.terminal_program import Program

PASTE = b"\x1b[200~" + b"\x1b[2mGET 200\r\n" * 101 + b"\x1b[201~"


@pytest.fixture
def screen(smollm2: Path, tmp_path: Path) -> Iterator[Program]:
    """localchat with SmolLM2, greedy and with short answers."""
    flags = ("-m", os.fspath(smollm2), "-o", "temperature", "0", "--max-tokens", "12")
    program = Program(tmp_path, (*flags, "--ctx", "4096", "--no-attach"), width=100, height=40)
    yield program
    program.close()


def stored(data: Path) -> Conversation:
    """Return the last conversation on the disk."""
    with History.open(data / "history.sqlite3") as history:
        summary = history.last()
        assert summary is not None
        return history.load(summary.id)


def wait_until_ready(program: Program) -> None:
    """Read until no answer is being written."""
    program.until(lambda: "● ready" in program.text)


def test_a_conversation_is_asked_stopped_continued_and_branched(
    screen: Program, tmp_path: Path
) -> None:
    screen.see("Ask anything")
    screen.ask("Name a color.")
    screen.see("tok/s")
    wait_until_ready(screen)
    assert len(stored(tmp_path).path()) == 2

    screen.ask("/set max_tokens 2000")
    screen.ask("Write a long story about a river.")
    screen.until(lambda: "● writing" in screen.text)
    screen.type("\x1b")
    screen.see("■ stopped")
    screen.ask("/set max_tokens 12")
    screen.type("\x1b[18~")  # F7 continues
    screen.until(lambda: screen.text.count("■ cut at 12 tokens") == 2)
    wait_until_ready(screen)

    screen.type("\x1b[15~")  # F5 answers again
    screen.see("‹ 2/2 ›")
    wait_until_ready(screen)

    screen.send(PASTE)
    screen.see("paste 1, 101 lines")
    screen.type("which status is in the log?\r")
    screen.until(lambda: len(stored(tmp_path).path()) == 6 and "● ready" in screen.text)
    question = stored(tmp_path).path()[4].message.content
    assert question.count("GET 200") == 101 and "which status" in question

    screen.type("\x1bOR")  # F3
    screen.until(lambda: "in use" in screen.text)
    assert "SmolLM2" in screen.text
    screen.type("\x1b")
    screen.until(lambda: "╭─ Models" not in screen.text)
    screen.type("\x11")
    assert screen.end() == 0
    answers = [node for node in stored(tmp_path).nodes.values() if node.message.role == "assistant"]
    assert len(answers) == 4
    assert all(node.message.content for node in answers)
