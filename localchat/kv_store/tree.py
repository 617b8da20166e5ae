"""Tree of the entries in one folder, by the names of their files: which entry continues which.

Only names are listed; the tokens of an entry are read when a text reaches its parent. Another program may add
and delete files at any time: a folder that changed is listed again, and a file that is gone is no longer there.
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
    keys_of,
    make_entry,
    read_head,
)

Usable: TypeAlias = Callable[[int, int, int], bool]
"""(length, earliest, tokens): whether a state of `length` tokens can be truncated to `tokens`."""

_LIST_INTERVAL_S = 1.0
"""A folder of blocks has thousands of files: listing them takes 10 ms of the engine core's thread."""


class Match(NamedTuple):
    """Entries that hold a text's beginning, in order."""

    entries: tuple[Entry, ...] = ()
    tokens: int = 0
    """Tokens of the text that they hold; the last entry may go on differently."""


class EntryTree:
    """Entries of a folder, callable from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._children: dict[bytes, set[bytes]] = {}
        self._heads: dict[bytes, Entry] = {}
        self._pending: set[bytes] = set()
        """Keys that are being written: they count as there."""
        self._listed_ns = -1
        self._listed_s = float("-inf")

    def add(self, entry: Entry) -> None:
        """Add an entry whose file is about to be written."""
        with self._lock:
            self._heads[entry.key] = entry
            self._children.setdefault(entry.parent, set()).add(entry.key)
            self._pending.add(entry.key)

    def written(self, entry: Entry, *, ok: bool, alone_since_ns: int = -1) -> None:
        """Note the end of a write. `alone_since_ns`: the folder's date before it, if nothing else of this
        program changed the folder since; then it need not be listed again for this write."""
        with self._lock:
            self._pending.discard(entry.key)
            if alone_since_ns == self._listed_ns:
                self._listed_ns = self.changed_ns()
        if not ok:
            self.remove(entry)

    def remove(self, entry: Entry) -> None:
        """Remove an entry that is not there or not whole."""
        with self._lock:
            self._heads.pop(entry.key, None)
            self._children.get(entry.parent, set()).discard(entry.key)

    def longest(self, root: bytes, ids: TokenIds32, usable: Usable | None = None) -> Match:
        """The entries that hold most of a text. usable: for entries that are whole states."""
        return self._search(root, ids, usable, whole=False)

    def covering(self, root: bytes, ids: TokenIds32) -> Match:
        """The entries that hold most of a text, and no other tokens."""
        return self._search(root, ids, None, whole=True)

    def _search(self, root: bytes, ids: TokenIds32, usable: Usable | None, *, whole: bool) -> Match:
        self._list_again()
        best = Match()
        paths: list[Match] = [Match()]
        parents = [root]
        while paths:
            path = paths.pop()
            parent = parents.pop()
            for entry in self._entries(parent, path.tokens):
                shared = _common(entry.ids, ids[path.tokens :])
                reached = Match((*path.entries, entry), path.tokens + shared)
                complete = shared == len(entry.ids)
                if usable is not None and not usable(entry.end, entry.earliest, reached.tokens):
                    continue
                if reached.tokens > best.tokens and (complete or not whole):
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
        path = self._folder / f"{parent.hex()}-{key.hex()}.kv"
        try:
            entry = read_head(path)
        except (OSError, EntryInvalid):
            with self._lock:
                self._children.get(parent, set()).discard(key)
            return None
        with self._lock:
            self._heads[key] = entry
        return entry

    def has(self, parent: bytes, key: bytes) -> bool:
        """Whether an entry is there or is being written, by the latest list."""
        with self._lock:
            return key in self._children.get(parent, ())

    def chain(
        self, parent: bytes, start: int, ids: TokenIds32, size: int, payload_bytes: int
    ) -> list[Entry]:
        """The entries of `size` tokens each that go on from `parent` and `start` as a text does."""
        self._list_again(_LIST_INTERVAL_S)
        found: list[Entry] = []
        while start + size <= len(ids):
            entry = make_entry(parent, start, ids[start : start + size], payload_bytes)
            if not self.has(parent, entry.key):
                break
            found.append(entry)
            parent = entry.key
            start = entry.end
        return found

    def changed_ns(self) -> int:
        """The folder's date."""
        try:
            return self._folder.stat().st_mtime_ns
        except OSError:
            return -1

    def _list_again(self, interval_s: float = 0.0) -> None:
        """List the folder, if it changed, and the last list is older than `interval_s`."""
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
            for parent, key in _names(self._folder):
                self._children.setdefault(parent, set()).add(key)
            for entry in pending:
                self._children.setdefault(entry.parent, set()).add(entry.key)
            there = {key for keys in self._children.values() for key in keys}
            self._heads = {key: head for key, head in self._heads.items() if key in there}


def _names(folder: Path) -> Iterator[tuple[bytes, bytes]]:
    try:
        with os.scandir(folder) as found:
            yield from filter(None, (keys_of(one.name) for one in found))
    except OSError:
        return


def _common(one: TokenIds32, other: TokenIds32) -> int:
    """Length of the common beginning."""
    shared = min(len(one), len(other))
    differs = one[:shared] != other[:shared]
    at = int(differs.argmax()) if shared else 0
    return at if shared and differs[at] else shared
