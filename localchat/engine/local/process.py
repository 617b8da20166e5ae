"""The child process of an engine: starts it, exchanges frames with it, and explains its death."""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from localchat.engine.local.frame_source import FrameSource
from localchat.engine.local.protocol import (
    Entered,
    FrameError,
    FrameWriter,
    FromChild,
    Phase,
    encode,
)
from localchat.errors import FAULT_STATUS, EngineDied

if TYPE_CHECKING:
    import asyncio

_LOG_LINES = 200
_LOG_LINE_BYTES = 2000
_SHOWN_LINES = 5
_LOAD_DEADLINE_S = 0.3
"""Time for a load to stop before the process is killed. A load has nothing to save."""
_LAST_LINES_S = 5.0
"""Only a program that the child started holds its stderr open for longer."""
# The child gets no secrets, so that nothing that native code prints or dumps can contain them.
_SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "APIKEY", "_KEY")


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the child: without secrets, and with settings that keep native code quiet.

    GOMP_SPINCOUNT: OpenMP workers that spin at barriers ruin decoding when another program uses the CPU
    (measured: one busy process on two cores, 250 to 3,390 ms a token; with it 100 to 160).
    TOKENIZERS_PARALLELISM: a batch of one text needs no pool of threads.
    GGML_NO_BACKTRACE: a failed assertion would start a debugger that prints on standard output.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not any(word in name.upper() for word in _SECRET_WORDS)
    }
    kept.setdefault("GOMP_SPINCOUNT", "2000")
    kept.setdefault("TOKENIZERS_PARALLELISM", "false")
    kept["GGML_NO_BACKTRACE"] = "1"
    return kept


class ChildProcess:
    """A child process."""

    def __init__(
        self,
        on_frame: Callable[[FromChild], None],
        on_exit: Callable[["ChildProcess"], None],
    ) -> None:
        """on_frame: receives each frame, from a thread or an event loop. on_exit: called by a thread."""
        self._on_frame = on_frame
        self._on_exit = on_exit
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self.phase: Phase = "open"
        self.build = ""
        self._frame_error = ""
        environment = child_environment(os.environ)
        # The child must import the same localchat, and with -P nothing from the working folder, which may
        # contain a json.py.
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        with _sigint_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "localchat.core"],
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
        self._frames = FrameSource(self._process.stdout.fileno(), self._receive)
        threading.Thread(
            target=self._read, args=(self._process.stdout,), name="engine-frames", daemon=True
        ).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame. If the child is gone, `on_exit` reports it.

        Raises UsageError for values that cannot be sent: lone surrogates, and integers over 64 bits.
        """
        self._send(encode(frame))

    def send_soon(self, frame: msgspec.Struct, sent: Callable[[], None] = lambda: None) -> None:
        """Send a frame without waiting.

        If it cannot be sent immediately, a thread sends it and then calls `sent`. Raises UsageError like
        `send`.
        """
        body = encode(frame)

        def send() -> None:
            self._send(body)
            sent()

        with suppress(OSError, ValueError):
            if not self._writer.send_at_once(body):
                threading.Thread(target=send, name="engine-request", daemon=True).start()

    def _send(self, body: bytes) -> None:
        # The pipe may be broken or closed.
        with suppress(OSError, ValueError):
            self._writer.send(body)

    def log(self) -> list[str]:
        """Return the last lines that the child or its native code printed."""
        return list(self._log)

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, deadline_s: float) -> None:
        """Close the pipe, wait, then kill. Returns after the process ended.

        A load gets at most _LOAD_DEADLINE_S, because a warm-up cannot be interrupted.
        """
        self.read_in_thread()
        self._close_stdin()
        if self.phase != "serve":
            deadline_s = min(deadline_s, _LOAD_DEADLINE_S)
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        # The process may be gone, with unread frames in the pipe.
        with suppress(OSError):
            self._process.stdin.close()

    def death(self) -> EngineDied:
        """Return the error that explains the death of the child, with its last log lines."""
        status = self._process.wait()
        name = signal_name(status)
        cause = f"was killed by {name}" if name else f"exited with status {status}"
        if status == FAULT_STATUS:
            cause = "ended because the GPU reported an error"
        activity = {
            "open": "reading",
            "load": "loading",
            "warmup": "warming up",
            "serve": "running",
        }
        if self._frame_error:
            cause = f"sent invalid data ({self._frame_error}) and was stopped"
        message = f"the engine {cause} while {activity[self.phase]} the model"
        lines = [line for line in self.log() if line.strip()][-_SHOWN_LINES:]
        if lines:
            message += "; its last log lines: " + " | ".join(lines)
        hint = _death_hint("" if self._frame_error else name, self.phase)
        return EngineDied(message, hint=hint, signal=name, status=status, phase=self.phase)

    def _keep_log(self, stream: IO[bytes]) -> None:
        with stream:
            for line in iter(lambda: stream.readline(_LOG_LINE_BYTES), b""):
                self._log.append(line.decode("utf-8", "replace").rstrip())

    def read_in(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Read frames in the event loop that waits for events, once the model is loaded. Thread-safe."""
        if self.phase == "serve":
            self._frames.read_in(loop)

    def read_in_thread(self) -> None:
        """Read frames in a thread, because no event loop waits for them. Thread-safe."""
        self._frames.read_in_thread()

    def _receive(self, frame: FromChild) -> None:
        if isinstance(frame, Entered):
            self.phase = frame.phase
            self.build = frame.build or self.build
        self._on_frame(frame)

    def _read(self, stream: IO[bytes]) -> None:
        completed = False
        try:
            self._frames.run()
            completed = True
        except (FrameError, OSError) as error:
            self._frame_error = str(error)
        finally:
            # Do this even if on_frame raises: no request may wait forever for frames that are not read.
            if not completed:
                self._process.kill()
            self._process.wait()
            self._log_thread.join(_LAST_LINES_S)
            self._close_stdin()
            stream.close()
            self._on_exit(self)


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT while a child process starts, which inherits the mask.

    Ctrl+C reaches the whole group, and the child needs some time before it ignores the signal. This process
    receives a blocked signal afterwards.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def signal_name(status: int) -> str:
    """Return the name of the signal that ended a process, or an empty string. status: as Popen has it."""
    if status >= 0:
        return ""
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _death_hint(name: str, phase: str) -> str:
    """Return advice on a dead engine. name: signal that ended it, or an empty string."""
    if name == "SIGBUS":
        return (
            "the model file changed or was truncated while it was in use, or its disk failed: "
            "restore the file or download it again"
        )
    if name and phase == "open":
        return "the file may be damaged: download it again, or try another file of this model"
    if name == "SIGKILL":
        return (
            "the system probably ended it because memory ran out: close other programs, or use a smaller "
            "model or context (--ctx). It restarts with the next message."
        )
    if name == "SIGILL":
        return (
            "this build of llama.cpp uses instructions that this CPU does not have: "
            "`localchat doctor --rebuild` makes one for this machine"
        )
    return "it restarts with the next message; `localchat doctor` checks the build"
