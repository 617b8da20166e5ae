"""Owners of entries: which conversation has what, so that deleting one deletes what only it had.

One text file for each conversation, a line for each entry. Lines are only ever appended, so two programs may
write to one file.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

_FOLDER = "owners"
_NAME_BYTES = 16
_MOST_KNOWN = 20_000

Keys = dict[str, set[bytes]]
"""Keys of entries by their namespace's folder name."""


class Owners:
    """The owners' files under a store's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER
        self._known: set[tuple[str, str, bytes]] = set()
        """Lines that need not be written again: some of them."""

    def _path(self, owner: str) -> Path:
        digest = hashlib.blake2b(owner.encode("utf-8", "replace"), digest_size=_NAME_BYTES)
        return self._folder / digest.hexdigest()

    def add(self, owner: str, namespace: str, key: bytes) -> None:
        """Note that an owner has an entry, with all before it. Raises OSError."""
        if (owner, namespace, key) in self._known:
            return
        for folder in (self._folder.parent, self._folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        handle = os.open(self._path(owner), flags, 0o600)
        try:
            os.write(handle, f"{namespace} {key.hex()}\n".encode())
        finally:
            os.close(handle)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add((owner, namespace, key))

    def take(self, owner: str) -> Keys:
        """Forget an owner, and return what it had. Raises OSError."""
        path = self._path(owner)
        found = _read(path)
        path.unlink(missing_ok=True)
        self._known = {known for known in self._known if known[0] != owner}
        return found

    def of_all(self) -> Keys:
        """What any owner has. Raises OSError."""
        found: Keys = {}
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                for namespace, keys in _read(path).items():
                    found.setdefault(namespace, set()).update(keys)
        return found


def with_ancestors(keys: set[bytes], parents: Mapping[bytes, bytes]) -> set[bytes]:
    """These keys and those that they continue, as far as they are there."""
    found: set[bytes] = set()
    for key in keys:
        at = key
        while at in parents and at not in found:
            found.add(at)
            at = parents[at]
    return found


def _read(path: Path) -> Keys:
    found: Keys = {}
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except FileNotFoundError:
        return found
    for line in lines:
        namespace, _, key = line.partition(" ")
        try:
            found.setdefault(namespace, set()).add(bytes.fromhex(key))
        except ValueError:
            continue  # a torn line
    return found
