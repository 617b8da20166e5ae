"""Registry of running servers, by which other programs of the same user find them.

One file per server, `servers/PID.json` in the state folder, readable by its owner only; it holds the URL and
the owner's token. A file whose process is gone is stale, and whoever finds it removes it.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from localchat import __version__
from localchat.config.paths import Paths
from localchat.state_file import StateFile

_FOLDER = "servers"


class Registration(msgspec.Struct, frozen=True):
    """Address and token of a running server."""

    pid: int
    url: str
    """As this machine reaches the server, without a path."""
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
    """A random secret."""
    return secrets.token_urlsafe(32)


def register(paths: Paths, url: str, token: str, now_s: float) -> Registered:
    """Register a server of this process. `now_s`: seconds of the Unix clock. Raises OSError."""
    about = Registration(os.getpid(), url.rstrip("/"), token, __version__, now_s)
    folder = paths.state_dir / _FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / f"{about.pid}.json"
    # An older file of this process id would pass its mode on, and might be a link.
    file.unlink(missing_ok=True)
    _file(file).write(about)
    return Registered(file, about)


def registered(
    paths: Paths, alive: Callable[[int], bool] | None = None
) -> tuple[Registration, ...]:
    """Registered servers of this user and version, newest first; removes stale files.

    Does not check that a server answers. `alive`: tells if a process runs (for tests).
    """
    is_alive = alive or _is_alive
    found = []
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
            found.append(about)
    return tuple(sorted(found, key=lambda about: about.started_s, reverse=True))


def _file(path: Path) -> StateFile[Registration | None]:
    return StateFile(path, Registration, None)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return False  # the id belongs to another user's process by now
    return True
