"""What the line mode reads from a terminal."""

import os
import pty
import subprocess
import sys

import pytest

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
