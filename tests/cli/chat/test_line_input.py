"""What the line mode reads from a terminal."""

import os
import pty
import select
import subprocess
import sys
from collections.abc import Sequence

import pytest

from localchat.cli.chat import line_input
from localchat.cli.chat.line_input import TerminalKeyboard
from localchat.cli.streams import Terminal


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("x" * 4095, True),
        ("語" * 1365, True),
        ("x" * 4094 + "\udce8", True),  # cut within a character
        ("x" * 4094, False),
        ("x" * 20_000, False),
    ],
)
def test_a_line_as_long_as_the_system_keeps_ahead_may_be_cut_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], line: str, told: bool
) -> None:
    monkeypatch.setattr("builtins.input", lambda sign="": line)
    assert TerminalKeyboard(Terminal({}, quiet=True)).read() == line
    assert ("the end of this line may be missing" in capfd.readouterr().err) == told


def test_a_byte_that_is_not_utf8_reaches_the_conversation_as_a_replacement_character() -> None:
    master, slave = pty.openpty()
    program = "from localchat.cli import _replace_invalid_bytes as prepare; prepare(); print(ascii(input()))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=slave, stdout=subprocess.PIPE, text=True
    ) as process:
        os.write(master, b"caf\xe9 au lait\n")
        output, _ = process.communicate(timeout=60)
    os.close(slave)
    os.close(master)
    assert output == r"'caf\ufffd au lait'" + "\n"


def test_a_line_that_arrives_during_the_check_keeps_its_first_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master, slave = pty.openpty()
    wait = select.select

    def select_after_typing(
        readers: Sequence[int], writers: Sequence[int], errors: Sequence[int], timeout_s: float
    ) -> tuple[list[int], list[int], list[int]]:
        os.write(master, b"/help\n")
        return wait(readers, writers, errors, 60)

    with os.fdopen(slave, encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        monkeypatch.setattr(select, "select", select_after_typing)
        assert not line_input._ended_during_answer()
        assert os.read(slave, 100) == b"/help\n"
    os.close(master)


def test_control_d_during_an_answer_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        assert not line_input._ended_during_answer()
        os.write(master, b"\x04")
        select.select([slave], [], [], 60)
        assert line_input._ended_during_answer()
    os.close(master)
