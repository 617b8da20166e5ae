"""A pseudo-terminal that notes when bytes come, reads as slowly as requested, and types."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parents[3]
_READ = 65_536
_SLICE_S = 0.01
_COLD = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
"""It would make every start recompile modules outside the environment."""


def surroundings(own: dict[str, str]) -> dict[str, str]:
    """The environment of a measured program: this checkout, with bytecode, on a terminal with all
    colours, and the program's `own` variables.
    """
    places = [str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")]
    kept = {name: value for name, value in os.environ.items() if name not in _COLD}
    colours = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "TEXTUAL_FPS": "120"}
    return {**kept, **colours, "PYTHONPATH": os.pathsep.join(places), **own}


class Terminal:
    """A program in a pseudo-terminal of `columns` by `rows`. `bytes_per_s`: how fast it is read; 0 for
    at once. Queries from the program get no reply.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 120,
        rows: int = 40,
        bytes_per_s: int = 0,
        own: dict[str, str] | None = None,
    ) -> None:
        self.begun_s = time.monotonic()
        self._rate = bytes_per_s
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=surroundings(own or {}),
        )
        os.close(slave)
        self.process = psutil.Process(self._process.pid)
        self._chunks: list[tuple[float, bytes]] = []
        self._came = threading.Condition()
        self.total_bytes = 0
        threading.Thread(target=self._read, daemon=True).start()

    def type(self, text: str) -> float:
        """Send keys; return the time."""
        now = time.monotonic()
        os.write(self._master, text.encode())
        return now

    def wait_for(self, text: str, since_s: float, limit_s: float = 20.0) -> float | None:
        """Seconds from `since_s` until `text` appeared; None if it did not within `limit_s`."""
        wanted = text.encode()
        deadline = time.monotonic() + limit_s
        with self._came:
            seen = 0
            tail = b""
            while True:
                for moment, chunk in self._chunks[seen:]:
                    if moment < since_s:
                        tail = b""
                        continue
                    if wanted in tail + chunk:
                        return moment - since_s
                    tail = (tail + chunk)[-len(wanted) :]
                seen = len(self._chunks)
                if not self._came.wait(max(0.0, deadline - time.monotonic())):
                    return None

    def forget(self) -> None:
        """Drop the output so far."""
        with self._came:
            self._chunks.clear()

    def output(self) -> bytes:
        """Output since the last `forget`."""
        with self._came:
            return b"".join(chunk for _, chunk in self._chunks)

    def cpu_s(self) -> float:
        """CPU time of the program, without its children."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def user_cpu_s(self) -> float:
        """CPU time of the program in its own code, without its children."""
        return float(self.process.cpu_times().user)

    def rss_mib(self) -> float:
        return float(self.process.memory_info().rss) / 2**20

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            os.close(self._master)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        allowed = 0.0
        last = time.monotonic()
        while True:
            size = _READ
            if self._rate:
                time.sleep(_SLICE_S)
                now = time.monotonic()
                allowed = min(allowed + (now - last) * self._rate, self._rate * 5 * _SLICE_S)
                last, size = now, int(allowed)
                if size < 1 or not select.select([self._master], [], [], 0)[0]:
                    continue
            try:
                chunk = os.read(self._master, size)
            except OSError:
                return
            if not chunk:
                return
            allowed -= len(chunk)
            with self._came:
                self.total_bytes += len(chunk)
                self._chunks.append((time.monotonic(), chunk))
                self._came.notify_all()
