"""A running server makes itself known to this user's other programs: a file that says where it is and by
which token it knows its owner.

One file a server, `servers/PID.json` in the state folder, readable by nobody else. A file of a process that
is gone is stale: it is removed by whoever finds it.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec

from localchat import __version__
from localchat.config.paths import Paths

_FOLDER = "servers"


class Registration(msgspec.Struct, frozen=True):
    """`url`: as this machine reaches it, without a path behind. `token`: gives all rights of the owner."""

    pid: int
    url: str
    token: str
    version: str
    started_s: float


class Registered:
    """A registration in force; `withdraw` takes it back."""

    def __init__(self, file: Path, about: Registration) -> None:
        self._file = file
        self.about = about

    def withdraw(self) -> None:
        """Idempotent."""
        self._file.unlink(missing_ok=True)


def new_token() -> str:
    """A secret that nobody guesses."""
    return secrets.token_urlsafe(32)


def register(paths: Paths, url: str, token: str, now_s: float) -> Registered:
    """Make a server of this process known. `now_s`: seconds of the Unix clock. Raises OSError."""
    about = Registration(os.getpid(), url.rstrip("/"), token, __version__, now_s)
    folder = paths.state_dir / _FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / f"{about.pid}.json"
    beside = folder / f".{about.pid}.new"
    beside.unlink(missing_ok=True)
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as opened:
        opened.write(msgspec.json.encode(about))
    beside.replace(file)
    return Registered(file, about)


def registered(
    paths: Paths, alive: Callable[[int], bool] | None = None
) -> tuple[Registration, ...]:
    """Servers of this user and of this version, the newest first. Stale files are removed. Whether a server
    answers is found out by asking it. `alive`: whether a process runs (tests)."""
    lives = alive or _alive
    found = []
    for file in sorted((paths.state_dir / _FOLDER).glob("*.json")):
        try:
            if file.stat().st_uid != os.getuid():
                continue  # somebody else's word sends no prompt anywhere
            about = msgspec.json.decode(file.read_bytes(), type=Registration)
        except (OSError, msgspec.DecodeError):
            continue
        if not lives(about.pid):
            file.unlink(missing_ok=True)
        elif about.version == __version__:
            found.append(about)
    return tuple(sorted(found, key=lambda about: about.started_s, reverse=True))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return False  # a process of somebody else that has the number now
    return True
