"""Run a program without network and without writes outside of one folder. A script without imports of ours.

    python -I -S sandbox_child.py FOLDER PROGRAM [ARGUMENT …]

New namespaces of Linux isolate it: user, mounts, network, processes and IPC. All mounts become read-only except
the folder; /tmp and its like are empty file systems in memory; sockets under /run are hidden, because a socket
leads to services outside. Exit status 125 means that the kernel does not allow this.
"""

import ctypes
import os
import signal
import sys
from typing import Final, NoReturn

_NAMESPACES: Final = 0x10000000 | 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000
"""CLONE_NEWUSER, NEWNS, NEWNET, NEWPID and NEWIPC."""
_BIND: Final = 0x1000
_RECURSIVE: Final = 0x4000
_PRIVATE: Final = 1 << 18
_NO_SUID_DEV: Final = 2 | 4
_MOUNT_SETATTR: Final = 442
"""Number of the system call on every architecture."""
_HERE: Final = -100
_ALL_BELOW: Final = 0x8000
_READ_ONLY: Final = 1
_NO_NEW_PRIVILEGES: Final = 38
_DIE_WITH_PARENT: Final = 1
_INNER_ID: Final = 1000
"""User and group inside. It is not root, so that the program has no capabilities to undo this."""
_SCRATCH: Final = ("/tmp", "/var/tmp", "/dev/shm")
_STORES: Final = ("current-system", "booted-system", "opengl-driver")
"""Entries of /run that lead to the programs of NixOS."""
_UNAVAILABLE: Final = 125

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns_fd")]


def main() -> NoReturn:
    folder = sys.argv[1]
    _checked(_libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0))
    user = os.getuid()
    group = os.getgid()
    _checked(_libc.unshare(_NAMESPACES))
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_INNER_ID} {user} 1")
    _write("/proc/self/gid_map", f"{_INNER_ID} {group} 1")
    # The first child is process 1 of the new namespace. All others end with it.
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _checked(_libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0))
    _mount_all(folder)
    os.chdir(folder)
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    os.execvp(sys.argv[2], sys.argv[2:])


def _mount_all(folder: str) -> None:
    _mount("none", "/", "", _RECURSIVE | _PRIVATE)
    # Descriptors from before the mounts hide a part of the way to the folder.
    _mount(folder, folder, "", _BIND | _RECURSIVE)
    scratch = [path for path in _SCRATCH if os.path.isdir(path) and not _contains(path, folder)]
    _set_attributes("/", _Attributes(set=_READ_ONLY))
    _set_attributes(folder, _Attributes(clear=_READ_ONLY))
    for path in scratch:
        _mount("tmpfs", path, "tmpfs", _NO_SUID_DEV)
    if scratch:
        os.environ["TMPDIR"] = scratch[0]
    if not _contains("/run", folder):
        _hide_services()
    _mount("proc", "/proc", "proc", _NO_SUID_DEV)


def _hide_services() -> None:
    for entry in os.scandir("/run"):
        if entry.name in _STORES or entry.is_symlink():
            continue
        if entry.is_dir():
            _mount("tmpfs", entry.path, "tmpfs", _NO_SUID_DEV)
        else:
            _mount("/dev/null", entry.path, "", _BIND)


def _contains(path: str, folder: str) -> bool:
    return f"{folder}/".startswith(f"{path}/")


def _set_attributes(path: str, attributes: _Attributes) -> None:
    """Change a mount and all mounts below it."""
    size = ctypes.sizeof(attributes)
    pointer = ctypes.byref(attributes)
    _checked(_libc.syscall(_MOUNT_SETATTR, _HERE, os.fsencode(path), _ALL_BELOW, pointer, size))


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    _checked(
        _libc.mount(os.fsencode(source), os.fsencode(target), kind.encode() or None, flags, None)
    )


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _checked(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    try:
        main()
    except OSError as problem:
        sys.stderr.write(f"sandbox: {problem}\n")
        os._exit(_UNAVAILABLE)
