"""Registry of running servers, where other programs of the same user find them.

Each server has a file `servers/PID.json` in the state folder, which only its owner can read. The file contains
the URL and the owner's token. If its process is gone, the next reader removes the file.
"""

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from localchat import __version__
from localchat.config.paths import Paths
from localchat.state_file import StateFile, is_running

_FOLDER = "servers"
_POLL_S = 0.05


class Registration(msgspec.Struct, frozen=True):
    """Address and token of a running server."""

    pid: int
    url: str
    """Address of the server on this machine, without a path."""
    token: str
    """Grants all rights of the owner."""
    version: str
    started_s: float


class Registered:
    """An active registration."""

    def __init__(self, file: Path, about: Registration) -> None:
        self._file = file
        self.about = about

    def withdraw(self) -> None:
        """Remove the registration. Idempotent."""
        self._file.unlink(missing_ok=True)


def new_token() -> str:
    """Return a random secret."""
    return secrets.token_urlsafe(32)


def register(paths: Paths, url: str, token: str, now_s: float) -> Registered:
    """Register a server of this process. `now_s`: seconds of the Unix clock. Raises OSError."""
    about = Registration(os.getpid(), url.rstrip("/"), token, __version__, now_s)
    folder = paths.state_dir / _FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / f"{about.pid}.json"
    # An older file with this process id would keep its mode, and might be a link.
    file.unlink(missing_ok=True)
    _file(file).write(about)
    return Registered(file, about)


def registered(
    paths: Paths, alive: Callable[[int], bool] | None = None
) -> tuple[Registration, ...]:
    """Return the registered servers of this user and version, newest first, and remove stale files.

    Does not check that a server answers. alive: returns True if a process runs (for tests).
    """
    is_alive = alive or is_running
    servers = []
    for file in sorted((paths.state_dir / _FOLDER).glob("*.json")):
        try:
            if file.stat().st_uid != os.getuid():
                continue  # another user must not be able to redirect prompts
        except OSError:
            continue
        if (about := _file(file).read()) is None:
            continue
        if not is_alive(about.pid):
            file.unlink(missing_ok=True)
        elif about.version == __version__:
            servers.append(about)
    return tuple(sorted(servers, key=lambda about: about.started_s, reverse=True))


def wait_for_end(paths: Paths, server: Registration, timeout_s: float) -> bool:
    """Wait until a server has unloaded its models and withdrawn its registration, or its process has ended.

    Return False after the timeout.
    """
    file = paths.state_dir / _FOLDER / f"{server.pid}.json"
    deadline_s = time.monotonic() + timeout_s
    while file.exists() and is_running(server.pid):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def _file(path: Path) -> StateFile[Registration | None]:
    return StateFile(path, Registration, None)
