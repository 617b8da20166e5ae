"""Hashes by which the hub names files: sha256 of the bytes, or git's blob id for small text files.

`pull` verifies whole files with it, and `partial_file` files that are still arriving.
"""

import hashlib
from pathlib import Path
from typing import Final

_READ_BYTES: Final = 1 << 20


class FileHash:
    """Running sha256 of a file. With `git` also its blob id, which starts with the file's size."""

    def __init__(self, size: int, *, git: bool = False) -> None:
        self._sha256 = hashlib.sha256()
        header = f"blob {size}\0".encode()
        self._blob = hashlib.sha1(header, usedforsecurity=False) if git else None

    def update(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        if self._blob is not None:
            self._blob.update(data)

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes received so far."""
        return self._sha256.hexdigest()

    @property
    def git_sha1(self) -> str:
        """Blob id. Empty without `git`."""
        if self._blob is not None:
            return self._blob.hexdigest()
        return ""


def hash_file(path: Path, *, git: bool = False) -> FileHash:
    """Read a whole file. Raises OSError."""
    file_hash = FileHash(path.stat().st_size, git=git)
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            file_hash.update(piece)
    return file_hash
