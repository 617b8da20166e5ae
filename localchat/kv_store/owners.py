"""Owners of entries: the conversations that use them.

Deleting a conversation deletes the entries that no other conversation uses. Each conversation has a text file
with a line per entry. Lines are only appended, so two programs may write to one file.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_FOLDER = "owners"
_NAME_BYTES = 16
_MAX_RECORDED = 20_000

Keys = dict[str, set[bytes]]
"""Keys of entries by the folder name of their namespace."""


class Owners:
    """The files of owners in a store's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER
        self._recorded: set[tuple[str, str, bytes]] = set()
        """Some of the lines in the files, which need not be written again."""

    def _path(self, owner: str) -> Path:
        digest = hashlib.blake2b(owner.encode("utf-8", "replace"), digest_size=_NAME_BYTES)
        return self._folder / digest.hexdigest()

    def add(self, owner: str, namespace: str, key: bytes) -> None:
        """Record that an owner uses an entry and its ancestors. Raises OSError."""
        if (owner, namespace, key) in self._recorded:
            return
        for folder in (self._folder.parent, self._folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        handle = os.open(self._path(owner), flags, 0o600)
        try:
            os.write(handle, f"{namespace} {key.hex()}\n".encode())
        finally:
            os.close(handle)
        if len(self._recorded) >= _MAX_RECORDED:
            self._recorded.clear()
        self._recorded.add((owner, namespace, key))

    def take(self, owner: str) -> Keys:
        """Remove an owner, and return its entries. Raises OSError."""
        path = self._path(owner)
        keys = _read(path)
        path.unlink(missing_ok=True)
        self._recorded = {line for line in self._recorded if line[0] != owner}
        return keys

    def of_all(self) -> Keys:
        """Return the entries of all owners. Raises OSError."""
        result: Keys = {}
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                for namespace, keys in _read(path).items():
                    result.setdefault(namespace, set()).update(keys)
        return result


def with_ancestors(keys: set[bytes], parents: Mapping[bytes, bytes]) -> set[bytes]:
    """Return the keys that exist, with all their existing ancestors."""
    result: set[bytes] = set()
    for key in keys:
        while key in parents and key not in result:
            result.add(key)
            key = parents[key]
    return result


def _read(path: Path) -> Keys:
    result: Keys = {}
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return result
    for line in lines:
        namespace, _, key = line.partition(" ")
        # A killed process may leave an incomplete line.
        with suppress(ValueError):
            result.setdefault(namespace, set()).add(bytes.fromhex(key))
    return result
