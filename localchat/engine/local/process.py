"""The engine's child process: started, watched, talked to in frames, ended."""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from localchat.engine.local.protocol import (
    Entered,
    FrameError,
    FrameReader,
    FrameWriter,
    FromChild,
    Phase,
)
from localchat.errors import EngineDied, UsageError

_LOG_LINES = 200
_LOG_LINE_BYTES = 2000
_TOLD_LINES = 5
_LAST_LINES_S = 5.0
"""Longer than that only a program that the child started holds its stderr open."""
# The child holds no secrets: what native code prints or dumps must not be able to contain them.
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "APIKEY", "_KEY")


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the child: without secrets, with what keeps native code quiet and polite.

    GOMP_SPINCOUNT: OpenMP workers that spin at barriers ruin decoding beside a busy neighbour (measured:
    one busy process on two cores, 250 to 3,390 ms a token; with it 100 to 160). GGML_NO_BACKTRACE: a
    failed assertion would start a debugger that prints on standard output.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not any(word in name.upper() for word in _SECRET_WORDS)
    }
    kept.setdefault("GOMP_SPINCOUNT", "2000")
    kept["GGML_NO_BACKTRACE"] = "1"
    return kept


class ChildProcess:
    """One child. `receive` is called with each frame and `gone` once at the end, both from one thread."""

    def __init__(
        self,
        receive: Callable[[FromChild], None],
        gone: Callable[["ChildProcess"], None],
        module: str = "localchat.core.process",
    ) -> None:
        self._receive = receive
        self._gone = gone
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self.phase: Phase = "open"
        self.build = ""
        self._trouble = ""
        environment = child_environment(os.environ)
        # The child must import the same localchat, however this process found it; and nothing from the folder
        # that it happens to be started in (-P), where anybody's json.py may lie.
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        with _deaf_to_ctrl_c():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._writer = FrameWriter(self._process.stdin)
        self._log_thread = threading.Thread(
            target=self._keep_log, args=(self._process.stderr,), name="engine-log", daemon=True
        )
        self._log_thread.start()
        threading.Thread(
            target=self._read, args=(self._process.stdout,), name="engine-frames", daemon=True
        ).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: msgspec.Struct) -> bool:
        """False when the child is gone (its end is told through `gone`). UsageError: the frame holds what no
        frame can (half a surrogate pair, a number of more than 64 bits)."""
        try:
            body = self._writer.encode(frame)
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            raise UsageError(f"this cannot be sent to the engine: {error}") from error
        try:
            self._writer.send(body)
        except (OSError, ValueError):  # a broken pipe, or one that was closed on purpose
            return False
        return True

    def log(self) -> list[str]:
        """The last lines that the child or its native code printed."""
        return list(self._log)

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self, deadline_s: float) -> None:
        """Close the pipe, wait, then kill. Returns when the process is gone."""
        self._hang_up()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hang_up(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it was gone already, with unread frames in the pipe
            self._process.stdin.close()

    def death(self) -> EngineDied:
        """Why the child is gone, in words, with its last log lines."""
        status = self._process.wait()
        name = _signal_name(status)
        what = f"was ended by {name}" if name else f"ended with status {status}"
        doing = {"open": "reading", "load": "loading", "warmup": "warming up", "serve": "running"}
        if self._trouble:
            what = f"sent what is no frame ({self._trouble}) and was ended"
        message = f"the engine {what} while {doing[self.phase]} the model"
        lines = [line for line in self.log() if line.strip()][-_TOLD_LINES:]
        if lines:
            message += "; its last log lines: " + " | ".join(lines)
        hint = "the next request starts it again; `localchat doctor` checks the build"
        if name and self.phase == "open":
            hint = "the file may be damaged: download it again, or try another file of this model"
        if name == "SIGKILL" and not self._trouble:
            hint = "often the system ended it for want of memory; the next request starts it again"
        return EngineDied(message, hint=hint, signal=name, status=status, phase=self.phase)

    def _keep_log(self, stream: IO[bytes]) -> None:
        with stream:
            for line in iter(lambda: stream.readline(_LOG_LINE_BYTES), b""):
                self._log.append(line.decode("utf-8", "replace").rstrip())

    def _read(self, stream: IO[bytes]) -> None:
        heard = False
        try:
            frames: FrameReader[FromChild] = FrameReader(stream, FromChild)
            for frame in frames:
                if isinstance(frame, Entered):
                    self.phase = frame.phase
                    self.build = frame.build or self.build
                self._receive(frame)
            heard = True
        except (FrameError, OSError) as error:
            self._trouble = str(error)
        finally:
            # Also when a receiver breaks: nobody may wait for ever on a child that nobody hears.
            if not heard:
                self._process.kill()
            self._process.wait()
            self._log_thread.join(_LAST_LINES_S)
            self._hang_up()
            stream.close()
            self._gone(self)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """A program that is started here inherits a blocked SIGINT: Ctrl+C reaches the whole group, and the child
    needs a while until it says itself that it ignores it. This process hears a blocked one afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal_name(status: int) -> str:
    if status >= 0:
        return ""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
