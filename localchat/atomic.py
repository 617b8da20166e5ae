"""Atomic file writes: into a temporary file, flushed to disk, then renamed."""

import os
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Replace a file, and create its folder. Raises OSError and leaves the old file unchanged.

    A link stays a link, so that a settings file may be stored elsewhere. The mode of a replaced file stays,
    and a new file is readable by its owner only. Lone surrogates of file names are written as the bytes that
    they represent.
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
