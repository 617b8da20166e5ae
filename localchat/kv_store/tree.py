"""Tree of the entries in one folder, built from the names of their files.

Listing the folder reads names only. The tokens of an entry are read when a search reaches its parent. Other
programs may add and delete files at any time, so a changed folder is listed again.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from localchat.kv_store.entry import (
    Entry,
    EntryInvalid,
    TokenIds32,
    is_exact,
    keys_of,
    make_entry,
    name_of,
    read_head,
)

Usable: TypeAlias = Callable[[int, int, int], bool]
"""Called with (length, earliest, tokens): whether a state of `length` tokens can be truncated to `tokens`."""

_LIST_INTERVAL_S = 1.0
"""A folder of blocks has thousands of files.

Listing them takes 10 ms of the engine core's thread.
"""


class Match(NamedTuple):
    """Entries with the prefix of a text, in order."""

    entries: tuple[Entry, ...] = ()
    tokens: int = 0
    """Length of the prefix. The last entry may continue differently from the text."""


class EntryTree:
    """Entries of a folder. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._children: dict[bytes, set[bytes]] = {}
        self._heads: dict[bytes, Entry] = {}
        self._exact: set[bytes] = set()
        """Keys of entries with the bits of a fresh computation."""
        self._pending: set[bytes] = set()
        """Keys of entries that are being written, which count as present."""
        self._listed_ns = -1
        self._listed_s = float("-inf")

    def add(self, entry: Entry) -> None:
        """Add an entry whose file is about to be written."""
        with self._lock:
            self._heads[entry.key] = entry
            self._add(entry.parent, entry.key, exact=entry.exact)
            self._pending.add(entry.key)

    def _add(self, parent: bytes, key: bytes, *, exact: bool) -> None:
        self._children.setdefault(parent, set()).add(key)
        if exact:
            self._exact.add(key)

    def written(self, entry: Entry, *, ok: bool, alone_since_ns: int = -1) -> None:
        """Record the end of a write.

        alone_since_ns: modification time of the folder before the write, if this program made no other changes
        since then. The folder need not be listed again in that case.
        """
        with self._lock:
            self._pending.discard(entry.key)
            if alone_since_ns == self._listed_ns:
                self._listed_ns = self.changed_ns()
        if not ok:
            self.remove(entry)
            if entry.exact:
                # Another file of this key may still be there.
                self._listed_ns = -1

    def remove(self, entry: Entry) -> None:
        """Remove an entry that is missing or damaged."""
        with self._lock:
            self._heads.pop(entry.key, None)
            self._exact.discard(entry.key)
            self._children.get(entry.parent, set()).discard(entry.key)

    def longest(self, root: bytes, ids: TokenIds32, usable: Usable | None = None) -> Match:
        """Return the entries with the longest prefix of a text. usable: filters entries that are states."""
        return self._search(root, ids, usable, complete_only=False)

    def covering(self, root: bytes, ids: TokenIds32) -> Match:
        """Return the entries with the longest prefix of a text that contain no other tokens."""
        return self._search(root, ids, None, complete_only=True)

    def _search(
        self, root: bytes, ids: TokenIds32, usable: Usable | None, *, complete_only: bool
    ) -> Match:
        self._refresh()
        best = Match()
        paths: list[Match] = [Match()]
        parents = [root]
        while paths:
            path = paths.pop()
            parent = parents.pop()
            for entry in self._entries(parent, path.tokens):
                shared = _common_prefix(entry.ids, ids[path.tokens :])
                reached = Match((*path.entries, entry), path.tokens + shared)
                complete = shared == len(entry.ids)
                if usable is not None and not usable(entry.end, entry.earliest, reached.tokens):
                    continue
                if reached.tokens > best.tokens and (complete or not complete_only):
                    best = reached
                if complete:
                    paths.append(reached)
                    parents.append(entry.key)
        return best

    def _entries(self, parent: bytes, start: int) -> Iterator[Entry]:
        with self._lock:
            keys = list(self._children.get(parent, ()))
        for key in keys:
            entry = self._heads.get(key) or self._read(parent, key)
            if entry is not None and entry.start == start:
                yield entry

    def _read(self, parent: bytes, key: bytes) -> Entry | None:
        path = self._folder / name_of(parent, key, exact=key in self._exact)
        try:
            entry = read_head(path)
        except (OSError, EntryInvalid):
            with self._lock:
                self._children.get(parent, set()).discard(key)
            return None
        with self._lock:
            self._heads[key] = entry
        return entry

    def has(self, parent: bytes, key: bytes, *, exact: bool = False) -> bool:
        """Return whether an entry was present or being written when the folder was last listed.

        exact: only one with the bits of a fresh computation counts.
        """
        with self._lock:
            present = key in self._children.get(parent, ())
            return present and (not exact or key in self._exact)

    def chain(
        self,
        parent: bytes,
        start: int,
        ids: TokenIds32,
        size: int,
        payload_bytes: int,
        *,
        exact: bool = False,
    ) -> list[Entry]:
        """Return the entries of `size` tokens that continue `parent` like a text from `start` on.

        exact: see `has`.
        """
        self._refresh(_LIST_INTERVAL_S)
        entries: list[Entry] = []
        while start + size <= len(ids):
            entry = make_entry(parent, start, ids[start : start + size], payload_bytes)
            if not self.has(parent, entry.key, exact=exact):
                break
            entries.append(entry._replace(exact=entry.key in self._exact))
            parent = entry.key
            start = entry.end
        return entries

    def changed_ns(self) -> int:
        """Return the modification time of the folder, -1 if it is missing."""
        try:
            return self._folder.stat().st_mtime_ns
        except OSError:
            return -1

    def _refresh(self, interval_s: float = 0.0) -> None:
        """List the folder if it changed and the last list is older than `interval_s`."""
        now_s = time.monotonic()
        if now_s - self._listed_s < interval_s:
            return
        changed_ns = self.changed_ns()
        with self._lock:
            if changed_ns == self._listed_ns:
                return
            self._listed_ns = changed_ns
            self._listed_s = now_s
            pending = [self._heads[key] for key in self._pending if key in self._heads]
            self._children = {}
            self._exact = set()
            for name, parent, key in _names(self._folder):
                self._add(parent, key, exact=is_exact(name))
            for entry in pending:
                self._add(entry.parent, entry.key, exact=entry.exact)
            present = {key for keys in self._children.values() for key in keys}
            self._heads = {key: head for key, head in self._heads.items() if key in present}


def _names(folder: Path) -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the names of entries, each with its parent and key."""
    try:
        with os.scandir(folder) as files:
            for file in files:
                if keys := keys_of(file.name):
                    yield file.name, *keys
    except OSError:
        return


def _common_prefix(a: TokenIds32, b: TokenIds32) -> int:
    """Return the length of the common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
