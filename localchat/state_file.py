"""StateFile: a small JSON file with a typed value, which is replaced as a whole.

A missing, unreadable or damaged file reads as the default. State is a cache or a convenience, so no program
fails because of it. If the user wrote the content, use `read_strictly`.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from localchat.atomic import write_text

T = TypeVar("T")


class StateFile(Generic[T]):
    """A value of `value_type` at `path`. Without a path, reads return the default and nothing is stored."""

    def __init__(self, path: Path | None, value_type: type[T], default: T) -> None:
        self.path = path
        self._type = value_type
        self._default = default

    def read(self) -> T:
        """Return the value on disk, or the default."""
        try:
            return self.read_strictly()
        except (OSError, msgspec.DecodeError):
            return self._default

    def read_strictly(self) -> T:
        """Return the value on disk, or the default if the file is missing.

        Raises OSError, msgspec.DecodeError.
        """
        if self.path is None:
            return self._default
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=self._type)
        except (FileNotFoundError, NotADirectoryError):
            return self._default

    def write(self, value: T) -> None:
        """Replace the file. A new file is readable by its owner only. Raises OSError."""
        if self.path is not None:
            text = msgspec.json.format(msgspec.json.encode(value))
            write_text(self.path, f"{text.decode()}\n")

    def update(self, change: Callable[[T], T], timeout_s: float) -> bool:
        """Write `change` of the current value under a lock.

        The lock prevents two processes from losing each other's changes. Returns False if another process
        held the lock for `timeout_s`. Raises OSError if the file cannot be written.
        """
        if self.path is None:
            return False
        from filelock import FileLock, Timeout

        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.path.with_suffix(".lock"), timeout=timeout_s):
                self.write(change(self.read()))
        except Timeout:
            return False
        return True


def is_running(pid: int) -> bool:
    """Return whether a process of this user has this id."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False  # it has ended, or the id now belongs to another user's process
    return True
