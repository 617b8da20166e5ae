"""Paths of settings, models, state and cache.

They follow the rules of the platform: XDG on Linux, `Library` on macOS.

Environment variables override them: `LOCALCHAT_CONFIG` names the settings file, `LOCALCHAT_DATA_DIR` one
folder for everything that the program writes, `LOCALCHAT_MODELS` the folder of models alone.
"""

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from localchat.units import size

MAX_INPUT_BYTES: Final = 256 * 2**20
"""Bytes of a text that a command reads."""
_APP = "localchat"
WRITES = "writes"
"""Folder of the journals beside the history."""
CRASH_RECORD = "safe-builds.json"
"""File in the state folder: builds that crashed before their first answer, and run in safe mode."""


class Paths(NamedTuple):
    """Absolute paths, whether or not they exist."""

    settings_file: Path
    data_dir: Path
    state_dir: Path
    cache_dir: Path
    models_dir: Path

    @property
    def kv_dir(self) -> Path:
        """Folder of the KV of conversations."""
        return self.cache_dir / "kv"

    @property
    def writes_dir(self) -> Path:
        """Folder of the journals of files that tools changed, by conversation."""
        return self.data_dir / WRITES


def find_paths(environ: Mapping[str, str]) -> Paths:
    """Return the paths in this environment. An empty variable counts as not set."""
    import platformdirs  # imported here: a tenth of the time that `--help` may take

    root = _path(environ.get("LOCALCHAT_DATA_DIR"))
    if root is not None:
        data = root
        state = root / "state"
        cache = root / "cache"
    else:
        data = platformdirs.user_data_path(_APP, appauthor=False)
        state = platformdirs.user_state_path(_APP, appauthor=False)
        cache = platformdirs.user_cache_path(_APP, appauthor=False)
    config = platformdirs.user_config_path(_APP, appauthor=False)
    return Paths(
        settings_file=_path(environ.get("LOCALCHAT_CONFIG")) or config / "settings.toml",
        data_dir=data,
        state_dir=state,
        cache_dir=cache,
        models_dir=_path(environ.get("LOCALCHAT_MODELS")) or data / "models",
    )


def file_state(path: Path) -> tuple[int, int, int]:
    """Return inode, date and size, which identify the content; zeros without a file."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_mtime_ns, status.st_size


def expand_home(path: str | Path) -> Path:
    """Replace a leading `~`. A path of an unknown user stays unchanged."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def open_input(path: Path) -> BinaryIO:
    """Open a file that the user names, for reading.

    Raises OSError, also for a named pipe or a device, which might never end. A pipe that the shell has opened,
    as in `<(COMMAND)`, is read.
    """
    mode = path.stat().st_mode
    has_end = stat.S_ISREG(mode) or stat.S_ISDIR(mode) or str(path) in ("/dev/null", "/dev/stdin")
    if not (has_end or str(path.parent) in ("/dev/fd", "/proc/self/fd")):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", os.fspath(path))
    return path.open("rb")


def read_input(path: Path, max_bytes: int = MAX_INPUT_BYTES) -> bytes:
    """Return the content of a file that the user names. Raises OSError, also above the limit."""
    with open_input(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {size(max_bytes)}", os.fspath(path))
    return data


def _path(text: str | None) -> Path | None:
    if not text:
        return None
    return expand_home(text).absolute()
