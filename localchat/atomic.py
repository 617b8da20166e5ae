"""Atomic file writes: into a temporary file, flushed to disk, then renamed."""

import os
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace `path`, and make its folder. Raises OSError, and then the old file is untouched.

    Follows a link, so that a settings file kept elsewhere stays a link; keeps the mode of the replaced file,
    and makes a new one readable by its owner only. Lone surrogates (of file names) are written
    as the bytes they stand for.
    """
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o777)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
