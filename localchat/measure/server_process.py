"""Server in a child process, on a free port, for a measurement or another program."""

import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Final

import httpx2

from localchat.config.settings import variable
from localchat.engine.local.process import child_environment
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


@contextmanager
def server_process(command: ServerCommand, environ: Mapping[str, str]) -> Iterator[str]:
    """Serve a model during the block, and yield the URL once it is loaded.

    The server exits with this process, even if that is killed. Raises the error of a failed load.
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
    log: deque[str] = deque(maxlen=_LOG_LINES)
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=_collect, args=(process.stderr, log), daemon=True)
    reader.start()
    try:
        url = process.stdout.readline().strip().removesuffix("/v1")
        _wait_until_loaded(url, process)
        if process.poll() is not None:
            reader.join(_EXIT_S)
            raise _exit_error(process.returncode, list(log), command.model)
        yield url
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


def _collect(lines: IO[str], log: deque[str]) -> None:
    with suppress(ValueError, OSError):  # the pipe is closed at the end
        log.extend(lines)


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
