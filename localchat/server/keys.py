"""API keys: from a file that nobody else can read, or the environment; never from the command line, which
every program of the machine can see."""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from localchat.errors import FileMissing, UsageError

VARIABLE: Final = "LOCALCHAT_API_KEY"
_LEAST = 8


def read_keys(file: Path | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The keys that open the server, none where nobody gave one. The file: a key a line; lines that begin
    with # are notes. Raises FileMissing, UsageError."""
    keys = [environ[VARIABLE]] if environ.get(VARIABLE) else []
    if file is not None:
        keys += _in_file(file)
    for key in keys:
        if len(key) < _LEAST or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                "an API key is too short, or holds characters that no header can carry",
                hint=f"at least {_LEAST} letters and digits; for a new one: openssl rand -hex 24",
            )
    return tuple(dict.fromkeys(keys))


def _in_file(file: Path) -> list[str]:
    try:
        about = file.stat()
        text = file.read_text(encoding="utf-8-sig")  # editors of Windows begin so
    except OSError as error:
        raise FileMissing(
            f"the file of API keys {file} cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is no text") from error
    if stat.S_IMODE(about.st_mode) & 0o077:
        raise UsageError(
            f"others of this machine can read the API keys in {file}", hint=f"chmod 600 {file}"
        )
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"there is no API key in {file}", hint="one a line")
    return keys
