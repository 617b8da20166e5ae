"""What the line mode reads from a terminal."""

import os
import pty
import subprocess
import sys


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
