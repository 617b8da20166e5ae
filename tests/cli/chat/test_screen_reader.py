"""`--screen-reader`: a conversation that only appends lines."""

import re
from pathlib import Path

import pytest

from tests.support.terminal_program import Program

pytestmark = pytest.mark.usefixtures("one_thread")

# Escape sequences, backspaces, and carriage returns that do not end a line.
MOVES = re.compile(rb"\x1b|\x08|\x0b|\x0c|\r(?!\r*\n)")


def test_a_conversation_moves_no_cursor(tmp_path: Path) -> None:
    program = Program(tmp_path, ("--screen-reader", "-m", "guide"), width=80, height=30)
    try:
        program.see("Ctrl+D leaves")
        program.type("How do I download a model?\n")
        program.see("End of answer.")
        program.type("/help\n")
        program.see("/new")
        program.type("/quit\n")
        program.process.wait(60)
        program.rest(0.5)
    finally:
        program.close()
    assert not MOVES.search(program.raw), program.raw
    assert b"localchat pull" in program.raw


def test_one_answer_ends_without_the_line_of_a_conversation(tmp_path: Path) -> None:
    program = Program(tmp_path, ("--screen-reader", "-m", "guide", "What is a KV cache?"))
    try:
        program.process.wait(120)
        program.rest(0.5)
    finally:
        program.close()
    assert not MOVES.search(program.raw), program.raw
