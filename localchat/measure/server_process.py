"""A server of our own in a child process, on a free port, for as long as it is measured."""

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

_END_S: Final = 15.0
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
    """How `localchat serve` is called."""

    model: str
    """The word for it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Values by key, over those of the settings file and the environment."""
    parallel: int | None = None
    """Requests computed at once; None: the server's default."""
    loop_guard: bool = False
    """End answers that repeat themselves forever."""

    def arguments(self) -> list[str]:
        """The command line behind the interpreter."""
        slots = [] if self.parallel is None else ["--parallel", str(self.parallel)]
        guard = [] if self.loop_guard else ["--no-loop-guard"]
        return [
            "-P",
            "-m",
            "localchat",
            "serve",
            self.model,
            "--port",
            "0",
            "--private",
            "--no-cache-disk",
            *guard,
            *slots,
        ]


@contextmanager
def server_process(command: ServerCommand, environ: Mapping[str, str]) -> Iterator[str]:
    """Serve a model until the end of the block; yields the URL once it is loaded.

    The server ends with this process, however that ends. Raises what its load raised."""
    environment = child_environment(environ)
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)  # noqa: PTH109
    environment |= {variable(key): value for key, value in command.settings.items()}
    process = subprocess.Popen(
        [sys.executable, *command.arguments()],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,  # Ctrl+C is for the benchmark, which then ends its server
    )
    log: deque[str] = deque(maxlen=_LOG_LINES)
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=_keep, args=(process.stderr, log), daemon=True)
    reader.start()
    try:
        url = process.stdout.readline().strip().removesuffix("/v1")
        _wait_ready(url, process)
        if process.poll() is not None:
            reader.join(_END_S)
            raise _end_error(process.returncode, list(log), command.model)
        yield url
    finally:
        _end(process)


def _wait_ready(url: str, process: "subprocess.Popen[str]") -> None:
    """Return once the model is loaded, or the process has ended."""
    with query_client() as client:
        while url and process.poll() is None:
            try:
                client.get(f"{url}/health").raise_for_status()
            except httpx2.HTTPError:
                time.sleep(_POLL_S)
            else:
                return
    process.wait()


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _keep(lines: IO[str], log: deque[str]) -> None:
    with suppress(ValueError, OSError):  # closed at the end
        log.extend(lines)


def _end_error(code: int, log: list[str], model: str) -> LocalchatError:
    """The error that the server printed, as ours."""
    starts = [at for at, line in enumerate(log) if line.startswith("localchat: ")]
    if code < 0 or not starts:
        shown = "".join(log[-5:]).strip()
        return EngineDied(f"the server of {model} ended before it was ready", hint=shown)
    first, *rest = log[starts[-1] :]
    hint = "\n".join(line.strip() for line in rest)
    return _ERRORS.get(code, LocalchatError)(first.removeprefix("localchat: ").strip(), hint=hint)


def server_properties(url: str, key: str = "") -> dict[str, object]:
    """`/props` of a server; empty where it has none."""
    try:
        with query_client(key) as client:
            found = client.get(f"{url}/props").raise_for_status().json()
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
