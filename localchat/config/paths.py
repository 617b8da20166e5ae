"""Paths of settings, models, state and cache, by the platform's rules (XDG on Linux, `Library` on macOS).

Environment variables override them: `LOCALCHAT_CONFIG` names the settings file, `LOCALCHAT_DATA_DIR` one
folder for everything that the program writes, `LOCALCHAT_MODELS` the folder of models alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_APP = "localchat"


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


def find_paths(environ: Mapping[str, str]) -> Paths:
    """The paths in this environment. An empty variable counts as not set."""
    import platformdirs  # imported here: a tenth of the time that `--help` may take

    root = _path(environ.get("LOCALCHAT_DATA_DIR"))
    data = root or platformdirs.user_data_path(_APP, appauthor=False)
    state = root / "state" if root else platformdirs.user_state_path(_APP, appauthor=False)
    cache = root / "cache" if root else platformdirs.user_cache_path(_APP, appauthor=False)
    config = platformdirs.user_config_path(_APP, appauthor=False)
    return Paths(
        settings_file=_path(environ.get("LOCALCHAT_CONFIG")) or config / "settings.toml",
        data_dir=data,
        state_dir=state,
        cache_dir=cache,
        models_dir=_path(environ.get("LOCALCHAT_MODELS")) or data / "models",
    )


def file_state(path: Path) -> tuple[int, int, int]:
    """Inode, date and size of a file, one of which changes with its content; zeros if there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size


def expand_home(path: str | Path) -> Path:
    """The path with the folder for a `~` at its beginning; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _path(text: str | None) -> Path | None:
    return expand_home(text).absolute() if text else None
