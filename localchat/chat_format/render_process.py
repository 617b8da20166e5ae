"""Helper process that runs chat templates in jinja2's sandbox, with limits on time and memory.

A template is an untrusted program. The sandbox hides Python's internals, but it does not stop a template that
computes forever or allocates all memory, which has brought down servers (CVE-2025-62426 and similar). Python
cannot kill a thread, but it can kill a process.
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

_WALL_TIME_FACTOR = 10
"""Wall time limit as a multiple of the CPU time limit, because a busy machine may delay a render."""

_WATCH_S = 0.05
_WATCH_MEMORY = sys.platform == "darwin"
"""macOS accepts RLIMIT_AS but does not enforce it."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Limits of one render. They grow with the input, because a long conversation renders to a long prompt."""

    seconds: float = 2.0
    """CPU time of a render."""
    compile_seconds: float = 5.0
    """CPU time of a compilation."""
    source: int = 256 << 10
    """Characters of a template."""
    text: int = 4 << 20
    """Characters of the rendered text, plus `text_per_input` for each byte of input."""
    text_per_input: int = 4
    memory_bytes: int = 256 << 20
    """Memory of all values, plus `memory_per_input` for each byte of input, up to `max_memory_bytes`."""
    memory_per_input: int = 32
    max_memory_bytes: int = 1 << 30


class RenderFailure(Exception):
    """A template raised an exception."""

    def __init__(self, reason: str, type_: str, message: str, line: int) -> None:
        super().__init__(message)
        self.reason = reason
        """`syntax`, `refused`, `broken`, `escape` or `limit` (see ChatTemplate)."""
        self.type = type_
        self.message = message
        self.line = line
        """Line of the template, 0 if unknown."""


class RenderProcess:
    """A helper process, started at the first use and again after it was killed.

    Thread-safe. It renders one template at a time, so a render may wait until the limits stop the previous one.
    Measured on two cores: 57 ms to start, 13 MB (PSS), 0.2 ms per render in addition to jinja2's own time.
    """

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._source: str | None = None
        """Template that the process received last."""
        self._end: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Start the process if it is not running, without waiting for it.

        The first render reports a failure.
        """
        with self._lock, suppress(TemplateError):
            self._running()

    def close(self) -> None:
        """Kill the process, even during a render. A later render starts it again."""
        self._end()

    def variables(self, source: str) -> frozenset[str]:
        """Return the names that a template reads but does not set. Raises RenderFailure and TemplateError."""
        if len(source) > self.limits.source:
            raise exceeded(
                f"is {len(source):,} characters long; {self.limits.source:,} are allowed"
            )
        reply = self._ask(source, None, None, self.limits.compile_seconds)
        return frozenset(reply["variables"])

    def render(self, source: str, values: Mapping[str, Any], now: datetime) -> str:
        """Render a template. Raises RenderFailure, and TemplateError if the values are not plain data."""
        text: str = self._ask(source, values, now, self.limits.seconds)["text"]
        return text

    def _ask(
        self, source: str, values: Mapping[str, Any] | None, now: datetime | None, seconds: float
    ) -> dict[str, Any]:
        limits = self.limits
        content = _json({"values": values, "now": now and now.isoformat()})
        size = len(source) + len(content)
        if size > limits.max_memory_bytes:
            raise exceeded("takes too much memory")
        memory_bytes = min(
            limits.memory_bytes + limits.memory_per_input * size, limits.max_memory_bytes
        )
        bounds = {
            "seconds": seconds,
            "memory_bytes": memory_bytes,
            "max_characters": limits.text + limits.text_per_input * size,
        }
        line = content[:-1] + b", " + _json(bounds)[1:] + b"\n"
        with self._lock:
            reply = self._exchange(source, line, seconds, memory_bytes)
            if reply.get("type") == "MemoryError":
                # Release the memory of the failed render.
                self._end()
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
            # The next request would read the reply to this one.
            self._end()
            raise
        if answer.endswith(b"\n"):
            reply: dict[str, Any] = json.loads(answer.decode("utf-8", "surrogatepass"))
            return reply
        self._end()
        raise exceeded(killed_for or _cause(process.returncode, seconds))

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the process, and start it if necessary. Call with the lock held."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._source = None
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            }
            try:
                # -S skips site's start-up files, which take time. PYTHONPATH has all paths.
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
            # Also kill the process if this object is collected, or the program exits, without close().
            self._end = weakref.finalize(self, _end, self._process)
        return self._process


def _watch(process: subprocess.Popen[bytes], seconds: float, memory_bytes: int) -> str:
    """Wait for a reply or the end of the process, and kill it after the time limit.

    Returns the reason for killing it, or an empty string.
    """
    assert process.stdout is not None
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN)
    # Count waits instead of reading the clock, which keeps running while Ctrl+Z stops both processes.
    wait_s = _WATCH_S if _WATCH_MEMORY else seconds
    for _ in range(int(_WALL_TIME_FACTOR * seconds / wait_s)):
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
    """Return why the process ended."""
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
        # Closing fails on unread bytes in a broken pipe, and while another thread reads.
        with suppress(OSError, ValueError):
            assert pipe is not None
            pipe.close()


def _json(value: object) -> bytes:
    """Return JSON in UTF-8 with lone surrogates. Raises TemplateError if the value is not plain data."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_reject)
    except TypeError as error:
        # A key is not a string.
        raise TemplateError(
            f"A chat template takes plain data: {error}.", reason="input"
        ) from error
    except (RecursionError, ValueError) as error:
        raise exceeded("is given values that nest too deep") from error
    return text.encode("utf-8", "surrogatepass")


def _reject(value: object) -> None:
    raise TemplateError(
        f"A chat template takes plain data, not {type(value).__name__}.", reason="input"
    )


def exceeded(cause: str) -> TemplateError:
    """Return the error of a render that exceeded a limit."""
    return TemplateError(
        f"The model's chat template was stopped: it {cause}.",
        hint="Shorten the conversation, or use a file of this model with a sound template.",
        reason="limit",
    )
