"""The folder that tools may use. No name leads out of it, and no link is followed.

Each name is opened part by part, relative to the folder before it, without following links. So a link that
appears between a check and an open changes nothing. Only regular files are read; a FIFO or a device is refused
without waiting for it.
"""

import errno
import os
import re
import secrets
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from localchat.errors import UsageError, os_errors_as, reason
from localchat.tools.tool import ToolError

MAX_FILE_BYTES: Final = 8 << 20
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_NAME: Final = 4096
_GIT: Final = re.compile(r"\.git|git~\d+")
"""Git's folder, also by its short name on Windows."""


class FileContent(NamedTuple):
    """Bytes and permission bits of a file."""

    data: bytes
    mode: int


class Root:
    """A folder and everything below it."""

    def __init__(self, folder: Path, protected: tuple[Path, ...] = ()) -> None:
        """`protected`: files and folders inside it that are never written. Raises UsageError."""
        with os_errors_as(UsageError, f"--root {folder} cannot be used"):
            self.path = folder.resolve(strict=True)
            self._fd = os.open(self.path, _FOLDER)
        self._protected = tuple(
            path.resolve()
            for path in protected
            if not self.path.is_relative_to(path.resolve())  # the user chose a folder inside it
        )
        top = _device("/")
        self._kernel_devices = {_device(path) for path in ("/proc", "/sys", "/dev")} - {top}
        if os.fstat(self._fd).st_dev in self._kernel_devices:
            raise UsageError(f"--root {folder} is not a folder of files", hint="use another folder")

    def close(self) -> None:
        """Close the folder. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def relative(self, name: str) -> str:
        """Return a name relative to the folder, `.` for the folder itself. Raises ToolError."""
        return "/".join(self._parts(name)) or "."

    def _parts(self, name: str) -> tuple[str, ...]:
        if "\0" in name or len(name) > _MAX_NAME:
            raise ToolError("the name of the file is not valid")
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as problem:
            raise ToolError("the name of the file is not valid") from problem
        path = PurePosixPath(name)
        if path.is_absolute():
            if not path.is_relative_to(self.path):
                raise self._outside(name)
            path = path.relative_to(self.path)
        parts: list[str] = []
        for part in path.parts:
            if part != "..":
                parts.append(part)
            elif parts:
                parts.pop()
            else:
                raise self._outside(name)
        return tuple(parts)

    def _outside(self, name: str) -> ToolError:
        return ToolError(
            f"{name} is outside of the folder that the tools may use",
            hint="use a path relative to that folder",
        )

    def folder(self, name: str) -> AbstractContextManager[int]:
        """Open a folder, and yield its descriptor. Raises ToolError."""
        return self._walk(self._parts(name), name)

    @contextmanager
    def _walk(
        self, parts: tuple[str, ...], name: str, created: list[str] | None = None
    ) -> Iterator[int]:
        """Open the folder of these parts. Create missing ones if `created` collects their names."""
        fd = os.dup(self._fd)
        try:
            for number, part in enumerate(parts):
                if created is not None:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=fd)
                        created.append("/".join(parts[: number + 1]))
                inner = os.open(part, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
                self._refuse_kernel_files(fd, name)
            yield fd
        except OSError as problem:
            raise _error(name, problem) from problem
        finally:
            os.close(fd)

    def _refuse_kernel_files(self, fd: int, name: str) -> None:
        if os.fstat(fd).st_dev in self._kernel_devices:
            raise ToolError(f"{name} is not a file on a disk")

    def read(self, name: str) -> FileContent | None:
        """Return a regular file, or None if it does not exist. Raises ToolError."""
        *folders, base = self._parts(name) or ("",)
        if not base:
            raise ToolError(f"{name} is a folder")
        try:
            with self._walk(tuple(folders), name) as folder:
                return self.read_in(folder, base, name)
        except ToolError as problem:
            if isinstance(problem.__cause__, FileNotFoundError):
                return None
            raise

    def read_in(self, folder: int, base: str, name: str) -> FileContent | None:
        """Read a file of an open folder. Raises ToolError, which names it `name`."""
        try:
            fd = os.open(base, _FILE, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise _error(name, problem) from problem
        try:
            status = os.fstat(fd)
            if stat.S_ISDIR(status.st_mode):
                raise ToolError(f"{name} is a folder")
            if not stat.S_ISREG(status.st_mode):
                raise ToolError(f"{name} is not a regular file")
            self._refuse_kernel_files(fd, name)
            with os.fdopen(fd, "rb", closefd=False) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as problem:
            raise _error(name, problem) from problem
        finally:
            os.close(fd)
        if len(data) > MAX_FILE_BYTES:
            raise ToolError(f"{name} has more than {MAX_FILE_BYTES >> 20} MB")
        return FileContent(data, stat.S_IMODE(status.st_mode))

    def check_writable(self, name: str) -> None:
        """Raise ToolError for files that run programs later, such as git's hooks."""
        parts = self._parts(name)
        if not parts:
            raise ToolError(f"{name} is a folder")
        path = _folded(self.path.joinpath(*parts))
        is_protected = any(path.is_relative_to(_folded(folder)) for folder in self._protected)
        if is_protected or any(_GIT.fullmatch(part) for part in path.parts[-len(parts) :]):
            raise ToolError(f"{name} cannot be changed by tools; the user can change it")

    def replace(
        self, name: str, content: FileContent | None, expected: FileContent | None
    ) -> list[str]:
        """Write a file that is still as `expected`, or delete it (None). Return the folders made for it.

        The new file replaces the name, so another hard link to the old one keeps its bytes. Raises ToolError
        and changes nothing if the file is not as expected.
        """
        *folders, base = self._parts(name)
        created: list[str] = []
        try:
            with self._walk(tuple(folders), name, created) as folder:
                if self.read_in(folder, base, name) != expected:
                    raise ToolError(f"{name} has changed meanwhile")
                if content is None:
                    os.unlink(base, dir_fd=folder)
                else:
                    self._write(folder, base, content)
        except BaseException:
            for new_folder in reversed(created):
                self.remove_folder(new_folder)
            raise
        return created

    def _write(self, folder: int, base: str, content: FileContent) -> None:
        temporary = f".localchat-{secrets.token_hex(8)}"
        fd = os.open(temporary, _NEW, 0o600, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content.data)
                file.flush()
                os.fchmod(fd, content.mode)
                os.fsync(fd)
            os.rename(temporary, base, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it is empty."""
        *folders, base = self._parts(name)
        with suppress(ToolError), self._walk(tuple(folders), name) as folder:
            os.rmdir(base, dir_fd=folder)


def _folded(path: Path) -> Path:
    """Return a path as the file systems of macOS and Windows compare names.

    They ignore case, some invisible characters, and dots and spaces at the end.
    """
    parts = []
    for part in path.parts:
        text = unicodedata.normalize("NFKC", part).casefold()
        visible = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
        parts.append(visible.rstrip(". ") or part)
    return Path(*parts)


def _device(folder: str) -> int | None:
    with suppress(OSError):
        return os.stat(folder).st_dev
    return None


def _error(name: str, problem: OSError) -> ToolError:
    if problem.errno in (errno.ELOOP, errno.ENOTDIR):
        return ToolError(f"{name} leads over a link or a file; tools follow no links")
    return ToolError(f"{name} cannot be opened: {reason(problem)}")
