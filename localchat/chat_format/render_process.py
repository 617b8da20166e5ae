"""Helper process in which chat templates run: jinja2's stock sandbox, bounded in time and memory.

A template is a program from a stranger. The sandbox keeps it from Python's internals; it does not
keep it from computing for ever or from taking all memory (that has brought servers down:
CVE-2025-62426 and its kin), and a thread cannot be killed. A process can.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from localchat.errors import TemplateError

_WORKER = Path(__file__).with_name("render_worker.py")

_LATEST = 10
"""Multiple of its limit that a render may wait for the CPU of a busy machine, in wall time."""

_WATCH_S = 0.05
_WATCH_MEMORY = sys.platform == "darwin"
"""macOS takes RLIMIT_AS and does not honour it."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Bounds of one render. Sizes grow with the input: a long conversation may give a long text."""

    seconds: float = 2.0
    """CPU time of a render."""
    compile_seconds: float = 5.0
    """CPU time of a compilation."""
    source: int = 256 << 10
    """Characters of a template."""
    text: int = 4 << 20
    """Characters of the text, plus `text_per_input` for each byte of input."""
    text_per_input: int = 4
    memory_bytes: int = 256 << 20
    """Memory of all values, plus `memory_per_input` for each byte of input, up to `most_memory_bytes`."""
    memory_per_input: int = 32
    most_memory_bytes: int = 1 << 30


class RenderFailure(Exception):
    """A template raised an exception."""

    def __init__(self, reason: str, type_: str, message: str, line: int) -> None:
        super().__init__(message)
        self.reason = reason
        """`syntax`, `refused`, `broken`, `escape` or `limit`: see ChatTemplate."""
        self.type = type_
        self.message = message
        self.line = line
        """Line of the template; 0 where it is not known."""


class RenderProcess:
    """One helper process, started at the first use and again after it was killed.

    Thread-safe; one render at a time, so one waits for another as long as the limits let it take.
    Measured on two cores: 57 ms to start, 13 MB (PSS), 0.2 ms a render on top of jinja2's own time.
    """

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._source: str | None = None
        """The template that the process has."""
        self._end: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the process if there is none, without waiting for it. The first render reports a failure."""
        with self._lock, suppress(TemplateError):
            self._running()

    def close(self) -> None:
        """End the process, a render under way too. A later render starts another."""
        self._end()

    @property
    def pid(self) -> int | None:
        """Process id; None while there is no process."""
        process = self._process
        if process is not None and process.poll() is None:
            return process.pid
        return None

    def variables(self, source: str) -> frozenset[str]:
        """Names that a template reads and does not set. Raises RenderFailure and TemplateError."""
        if len(source) > self.limits.source:
            raise exceeded(
                f"is {len(source):,} characters long; {self.limits.source:,} are allowed"
            )
        reply = self._ask(source, None, None, self.limits.compile_seconds)
        return frozenset(reply["variables"])

    def render(self, source: str, values: Mapping[str, Any], now: datetime) -> str:
        """Text of a template. Raises RenderFailure, and TemplateError for what is not plain data."""
        text: str = self._ask(source, values, now, self.limits.seconds)["text"]
        return text

    def _ask(
        self, source: str, values: Mapping[str, Any] | None, now: datetime | None, seconds: float
    ) -> dict[str, Any]:
        limits = self.limits
        content = _json({"values": values, "now": now and now.isoformat()})
        size = len(source) + len(content)
        if size > limits.most_memory_bytes:
            raise exceeded("takes too much memory")
        memory_bytes = min(
            limits.memory_bytes + limits.memory_per_input * size, limits.most_memory_bytes
        )
        bounds = {
            "seconds": seconds,
            "memory_bytes": memory_bytes,
            "most": limits.text + limits.text_per_input * size,
        }
        line = content[:-1] + b", " + _json(bounds)[1:] + b"\n"
        with self._lock:
            reply = self._exchange(source, line, seconds, memory_bytes)
            if reply.get("type") == "MemoryError":
                self._end()  # gives back what it holds
        if "reason" in reply:
            raise RenderFailure(reply["reason"], reply["type"], reply["message"], reply["line"])
        return reply

    def _exchange(
        self, source: str, line: bytes, seconds: float, memory_bytes: int
    ) -> dict[str, Any]:
        """Send a request and read its reply."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        killed_for = ""
        try:
            with suppress(BrokenPipeError):
                if source != self._source:
                    process.stdin.write(_json({"source": source}) + b"\n")
                    self._source = source
                process.stdin.write(line)
                process.stdin.flush()
                killed_for = _watch(process, seconds, memory_bytes)
            answer = process.stdout.readline()
        except BaseException:
            self._end()  # the next request would read this one's answer
            raise
        if answer.endswith(b"\n"):
            reply: dict[str, Any] = json.loads(answer.decode("utf-8", "surrogatepass"))
            return reply
        self._end()
        raise exceeded(killed_for or _cause(process.returncode, seconds))

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, started if there is none. Call with the lock held."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._source = None
            # -S: site's start-up files take time, and the paths come with PYTHONPATH anyway.
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            }
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-S", str(_WORKER)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                )
            except OSError as error:
                raise TemplateError(
                    f"The chat template cannot be rendered: no process could be started ({error}).",
                    hint="Close other programs, or raise the limits of processes and open files.",
                    reason="limit",
                ) from error
            # Ends the process too if this object is dropped, or the program left, without close().
            self._end = weakref.finalize(self, _end, self._process)
        return self._process


def _watch(process: subprocess.Popen[bytes], seconds: float, memory_bytes: int) -> str:
    """Wait for an answer or the end of the process, and kill it after too long. Returns why it was killed."""
    assert process.stdout is not None
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN)
    # Counts waits instead of reading the clock, which runs on while Ctrl+Z stops both processes.
    wait_s = _WATCH_S if _WATCH_MEMORY else seconds
    for _ in range(int(_LATEST * seconds / wait_s)):
        if ready.poll(wait_s * 1000):
            return ""
        if _WATCH_MEMORY and _resident_bytes(process.pid) > memory_bytes:
            process.kill()
            return "takes too much memory"
    process.kill()
    return f"takes longer than {seconds:g} s"


def _resident_bytes(pid: int) -> int:
    import psutil

    with suppress(psutil.Error):
        resident: int = psutil.Process(pid).memory_info().rss
        return resident
    return 0


def _cause(returncode: int, seconds: float) -> str:
    """Why the process ended."""
    if returncode == -signal.SIGPROF:
        return f"takes longer than {seconds:g} s"
    name = f"exit status {returncode}"
    with suppress(ValueError):
        name = signal.Signals(-returncode).name
    return f"ended the process that renders it ({name})"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and reap it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(
            OSError, ValueError
        ):  # unread bytes in a broken pipe; a reader in another thread
            assert pipe is not None
            pipe.close()


def _json(value: object) -> bytes:
    """JSON in UTF-8, half surrogate pairs kept. Raises TemplateError for what is not plain data."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_refuse)
    except TypeError as error:  # a key that is no text
        raise TemplateError(
            f"A chat template takes plain data: {error}.", reason="input"
        ) from error
    except (RecursionError, ValueError) as error:
        raise exceeded("is given values that nest too deep") from error
    return text.encode("utf-8", "surrogatepass")


def _refuse(value: object) -> None:
    raise TemplateError(
        f"A chat template takes plain data, not {type(value).__name__}.", reason="input"
    )


def exceeded(what: str) -> TemplateError:
    """Error of a render that was stopped."""
    return TemplateError(
        f"The model's chat template was stopped: it {what}.",
        hint="Shorten the conversation, or use a file of this model with a sound template.",
        reason="limit",
    )
