"""Shared by tests: Call, Outcome, Screen."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


_OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(os.open(sys.argv[1], os.O_RDWR), termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


_PATIENCE_S = 90.0


class Screen:
    """A program on a pseudo-terminal: what it writes, and keys for it."""

    def __init__(self, args: Sequence[str], *, stdin: bytes | None = None, term: str) -> None:
        self._master, slave = pty.openpty()
        self._seen = ""
        os.set_blocking(self._master, False)
        pipe = subprocess.PIPE if stdin is not None else slave
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, os.ttyname(slave), *args],
            stdin=pipe,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": term},
        )
        os.close(slave)
        if stdin is not None and self.process.stdin is not None:
            self.process.stdin.write(stdin)
            self.process.stdin.close()

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt(self, text: str = "") -> None:
        """Press Ctrl+C at a prompt until the program ends, or `text` comes: Python overlooks the one that comes
        after the prompt was written and before its read has begun."""
        end = time.monotonic() + _PATIENCE_S
        while self.process.poll() is None and not (text and text in self._seen):
            assert time.monotonic() < end, f"nothing happens; on the screen: {self._seen!r}"
            self.press("\x03")
            again = time.monotonic() + 2.0
            while time.monotonic() < again and self.process.poll() is None:
                select.select([self._master], [], [], 0.1)
                self._read()
                if text and text in self._seen:
                    break

    def wait_for(self, text: str) -> str:
        """Everything since the last wait, up to and with `text`."""
        end = time.monotonic() + _PATIENCE_S
        while text not in self._seen:
            assert time.monotonic() < end, f"{text!r} did not come; on the screen: {self._seen!r}"
            select.select([self._master], [], [], 0.2)
            self._read()
        before, _, self._seen = self._seen.partition(text)
        return before + text

    def finish(self) -> tuple[int, str]:
        """Exit code and what was not read yet."""
        end = time.monotonic() + _PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it does not end; on the screen: {self._seen!r}"
            select.select([self._master], [], [], 0.1)
            self._read()
        self._read()
        return self.process.returncode, self._seen

    def read(self) -> str:
        """What came since the last look; waits 0.1 s at most."""
        select.select([self._master], [], [], 0.1)
        self._read()
        seen, self._seen = self._seen, ""
        return seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def _read(self) -> None:
        with suppress(OSError):  # nothing there, or the other side has closed
            self._seen += os.read(self._master, 65536).decode("utf-8", "replace")
