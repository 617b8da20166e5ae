"""Server in a child process, on a free port, for a measurement or another program."""

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Final

import httpx2

from localchat.config.settings import variable
from localchat.engine.local.process import child_environment, signal_name
from localchat.errors import (
    DoesNotFit,
    EngineDied,
    ExitCode,
    LocalchatError,
    ModelInvalid,
    ModelMissing,
    UsageError,
)
from localchat.http_transport import query_client

_EXIT_S: Final = 15.0
_POLL_S: Final = 0.05
_LOG_LINES: Final = 200
_SHOWN_LINES: Final = 10
_NOTICE: Final = re.compile(r"localchat: .+?: (.+)\n")
"""Line about a model. The others are about the server or a request."""
_HEALTH_CHECK: Final = " GET /health "
"""Part of the lines about our own requests while the model loads."""
_ERRORS: Final[Mapping[int, type[LocalchatError]]] = {
    ExitCode.USAGE: UsageError,
    ExitCode.MODEL_MISSING: ModelMissing,
    ExitCode.DOES_NOT_FIT: DoesNotFit,
    ExitCode.ERROR: ModelInvalid,
}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Arguments of `localchat serve`."""

    model: str
    """Name or path of the model."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Values by key, which override the settings file and the environment."""
    parallel: int | None = None
    """Requests computed at once; None for the server's default."""
    loop_guard: bool = False
    """End answers that repeat themselves forever."""
    cache_disk: bool = False
    """Store the KV cache of prompts on disk, as the settings say."""
    key: str = field(default="", repr=False)
    """API key that clients must send. Empty if they need none."""

    def arguments(self) -> list[str]:
        """Return the command line after the interpreter."""
        arguments = ["-P", "-m", "localchat", "serve", self.model]
        arguments += ["--port", "0", "--private"]
        if not self.cache_disk:
            arguments.append("--no-cache-disk")
        if not self.loop_guard:
            arguments.append("--no-loop-guard")
        if self.parallel is not None:
            arguments += ["--parallel", str(self.parallel)]
        return arguments


class ServerProcess:
    """A server in a child process, whose model is loaded."""

    def __init__(
        self, url: str, model: str, process: "subprocess.Popen[str]", log: "ServerLog"
    ) -> None:
        self.url = url
        self._model = model
        self._process = process
        self._log = log

    @contextmanager
    def watched(self, on_exit: Callable[[], None]) -> Iterator[None]:
        """Call `on_exit` from a thread if the server exits during the block."""
        is_over = threading.Event()

        def watch() -> None:
            self._process.wait()
            if not is_over.is_set():
                on_exit()

        threading.Thread(target=watch, name="watch-server", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def failure(self) -> LocalchatError | None:
        """Return the error of a server that has exited, with the end of its log. None if it runs."""
        status = self._process.poll()
        if status is None:
            return None
        lines = [line for line in self._log.complete() if _HEALTH_CHECK not in line]
        reason = signal_name(status) or f"exit code {status}"
        if reason == "SIGKILL":
            reason += ", which the system sends when memory runs out"
        hint = ""
        if lines:
            hint = "".join(("its last lines:\n", *lines[-_SHOWN_LINES:])).strip()
        return EngineDied(f"the server of {self._model} ended: {reason}", hint=hint)


class ServerLog:
    """The last lines that a server printed on stderr, read by a thread."""

    def __init__(self, lines: IO[str], notify: Callable[[str], None] = lambda notice: None) -> None:
        """`notify`: called by the thread with each notice about the model."""
        self._notify = notify
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._reader = threading.Thread(target=self._collect, args=(lines,), daemon=True)
        self._reader.start()

    def _collect(self, lines: IO[str]) -> None:
        with suppress(ValueError, OSError):  # the pipe is closed at the end
            for line in lines:
                self._lines.append(line)
                if match := _NOTICE.fullmatch(line):
                    self._notify(match[1])

    def complete(self) -> list[str]:
        """Return the lines of a server that has exited."""
        self._reader.join(_EXIT_S)
        return list(self._lines)


@contextmanager
def server_process(
    command: ServerCommand,
    environ: Mapping[str, str],
    notify: Callable[[str], None] = lambda notice: None,
) -> Iterator[ServerProcess]:
    """Serve a model during the block, and yield the server once the model is loaded.

    The server exits with this process, even if that is killed. `notify` is called by another thread with
    notices about the model. Raises the error of a failed load.
    """
    environment = child_environment(environ)
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109
    environment |= {variable(key): value for key, value in command.settings.items()}
    if command.key:
        environment["LOCALCHAT_API_KEY"] = command.key
    process = subprocess.Popen(
        [sys.executable, *command.arguments()],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Ctrl+C must reach this process alone, which then ends its server.
        process_group=0,
    )
    assert process.stdout is not None and process.stderr is not None
    log = ServerLog(process.stderr, notify)
    try:
        url = process.stdout.readline().strip().removesuffix("/v1")
        _wait_until_loaded(url, process)
        if process.poll() is not None:
            raise _exit_error(process.returncode, log.complete(), command.model)
        yield ServerProcess(url, command.model, process, log)
    finally:
        _terminate(process)


def _wait_until_loaded(url: str, process: "subprocess.Popen[str]") -> None:
    """Return once the model is loaded, or the process has exited."""
    with query_client() as client:
        while url and process.poll() is None:
            try:
                client.get(f"{url}/health").raise_for_status()
            except httpx2.HTTPError:
                time.sleep(_POLL_S)
            else:
                return
    process.wait()


def _terminate(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _exit_error(code: int, log: list[str], model: str) -> LocalchatError:
    """Turn the last error that the server printed into an exception."""
    starts = [index for index, line in enumerate(log) if line.startswith("localchat: ")]
    if code < 0 or not starts:
        shown = "".join(log[-5:]).strip()
        return EngineDied(f"the server of {model} ended before it was ready", hint=shown)
    first, *more = log[starts[-1] :]
    hint = "\n".join(line.strip() for line in more)
    return _ERRORS.get(code, LocalchatError)(first.removeprefix("localchat: ").strip(), hint=hint)


def server_properties(url: str, key: str = "") -> dict[str, object]:
    """Read `/props` of a server; empty if it has no such route."""
    try:
        with query_client(key) as client:
            properties = client.get(f"{url}/props").raise_for_status().json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
        return {}
    if not isinstance(properties, dict):
        return {}
    return properties
