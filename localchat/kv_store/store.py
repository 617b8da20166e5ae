"""KVStore: entries of all models in one folder of limited size. It is a cache, so losing it is harmless.

A full or read-only disk stops the writing with one notice. An unreadable entry is a miss.
"""

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from localchat.kv_store.entry import (
    PART_SUFFIX,
    Entry,
    EntryInvalid,
    TokenIds32,
    keys_of,
    make_entry,
    read_head,
    read_payload,
    read_unchecked,
    root_key,
    write_entry,
)
from localchat.kv_store.eviction import MAX_FILES, StoredFile, victims
from localchat.kv_store.owners import Owners, with_ancestors
from localchat.kv_store.tree import EntryTree, Match, Usable
from localchat.kv_store.writer import Writer

ABOUT_NAME = "about.json"
FREE_SHARE = 0.25
"""Maximum share of the disk space that is free without the entries."""
_PART_AGE_S = 60.0
"""Age after which an unfinished file was left by a killed program."""
_BATCH_BYTES = 64_000_000
_SHARE = 8
"""Part of the limit (1/8) to free at once.

Listing thousands of files takes Python's lock for 30 ms.
"""
_MAX_UNCHECKED_BYTES = 2_000_000_000
"""Bytes to write before checking the limit and the free disk space again."""


class About(msgspec.Struct, frozen=True):
    """Description of a namespace in its folder, for listings."""

    model: str


class NamespaceSummary(NamedTuple):
    """Entries of one model."""

    folder: str
    model: str
    entries: int
    size_bytes: int
    used_s: float
    """Time of the last use of an entry, in seconds since 1970."""


class ReadBack(NamedTuple):
    """Entries and their payloads."""

    entries: tuple[Entry, ...]
    payloads: tuple[memoryview, ...]


class KVStore:
    """The folder with all namespaces. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        notify: Callable[[str], None] = lambda _: None,
        *,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._notify = notify
        self._free_bytes = free_bytes
        self._lock = threading.Lock()
        self._writable = True
        self._unchecked_bytes = 0
        """Bytes that may be written before the limit is checked again."""
        self.owners = Owners(folder)
        self.writer = Writer()
        self.evictions = 0

    @property
    def writable(self) -> bool:
        """Whether new entries are accepted."""
        return self._writable and self._limit_bytes > 0

    def namespace(self, description: str, model: str) -> "Namespace":
        """Return the entries of one model, build and KV type, which `description` fully identifies."""
        return Namespace(self, description, model)

    def write(self, namespace: "Namespace", entry: Entry, payload: list[memoryview]) -> bool:
        """Write an entry now. Return False without room for it, or if the disk is not writable."""
        if not self.writable:
            return False
        size = entry.file_bytes
        try:
            self._make_folder(namespace)
            if size > self._unchecked_bytes:
                room = self.make_room(size)
                self._unchecked_bytes = room if _is_reachable(namespace.folder, entry) else 0
                if size > self._unchecked_bytes:
                    return False
            self._unchecked_bytes -= size
            write_entry(namespace.folder, entry, payload)
        except OSError as error:
            self.stop_writing(error)
            return False
        return True

    def stop_writing(self, error: OSError) -> None:
        """Stop writing, and notify the user once."""
        with self._lock:
            was_writable = self._writable
            self._writable = False
        if was_writable:
            cause = error.strerror or type(error).__name__
            self._notify(f"Conversations are not kept ready on the disk: {cause} ({self.folder}).")

    def _make_folder(self, namespace: "Namespace") -> None:
        if namespace.about_written:
            return
        for folder in (self.folder, namespace.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = msgspec.json.encode(About(namespace.model))
        path = namespace.folder / ABOUT_NAME
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(about)
        namespace.about_written = True

    def allowed_bytes(self, used_bytes: int) -> int:
        """Return the maximum size of all entries now, of which they use `used_bytes`."""
        free = self._free_bytes(self.folder)
        return min(self._limit_bytes, int((free + used_bytes) * FREE_SHARE))

    def make_room(self, size_bytes: int) -> int:
        """Evict entries if necessary, and return the bytes that may be written now.

        Returns 0 if `size_bytes` do not fit. Raises OSError.
        """
        files = list(self.files())
        used = sum(file.size_bytes for file in files)
        allowed = self.allowed_bytes(used)
        required = 2 * size_bytes + min(_BATCH_BYTES, self._limit_bytes // (2 * _SHARE))
        if allowed < required:
            return 0
        if used > allowed - required or len(files) > MAX_FILES:
            target = max(0, allowed - max(required, self._limit_bytes // _SHARE))
            for file in victims(files, target):
                file.path.unlink(missing_ok=True)
                self.evictions += 1
                used -= file.size_bytes
        # Another program may write as much at the same time.
        return min((allowed - used) // 2, _MAX_UNCHECKED_BYTES)

    def files(self) -> Iterator[StoredFile]:
        """Yield all entries, and delete unfinished files of killed programs."""
        for folder in self._folders():
            with suppress(OSError), os.scandir(folder) as items:
                for item in items:
                    keys = keys_of(item.name)
                    try:
                        status = item.stat()
                    except OSError:
                        # Another program deleted it.
                        continue
                    path = Path(item.path)
                    if keys is not None:
                        yield StoredFile(path, *keys, status.st_size, _used_s(status.st_mtime))
                    elif item.name.endswith(PART_SUFFIX) and _is_abandoned(status.st_mtime):
                        path.unlink(missing_ok=True)

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if (path / ABOUT_NAME).is_file())
        except OSError:
            return []

    def summaries(self) -> list[NamespaceSummary]:
        """Return a summary per model, the last used first."""
        by_folder: dict[Path, list[StoredFile]] = {}
        for file in self.files():
            by_folder.setdefault(file.path.parent, []).append(file)
        lines = [
            NamespaceSummary(
                folder.name,
                _about(folder).model,
                len(files),
                sum(file.size_bytes for file in files),
                max(file.used_s for file in files),
            )
            for folder, files in by_folder.items()
        ]
        return sorted(lines, key=lambda line: -line.used_s)

    def clear(self, model: str = "") -> int:
        """Delete everything, or the entries of one model. Return the freed bytes. Raises OSError."""
        freed = 0
        for line in self.summaries():
            if not model or line.model == model:
                freed += line.size_bytes
        for folder in self._folders():
            if not model or _about(folder).model == model:
                shutil.rmtree(folder)
        if not model and self.folder.is_dir():
            shutil.rmtree(self.folder)
        return freed

    def forget(self, owner: str) -> int:
        """Delete the entries that only this conversation uses. Return the freed bytes. Raises OSError."""
        own_keys = self.owners.take(owner)
        freed = 0
        other_keys = self.owners.of_all()
        for namespace, keys in own_keys.items():
            folder = self.folder / namespace
            files = [file for file in self.files() if file.path.parent == folder]
            parents = {file.key: file.parent for file in files}
            shared = with_ancestors(other_keys.get(namespace, set()), parents)
            unused = with_ancestors(keys, parents) - shared
            for file in files:
                if file.key in unused:
                    file.path.unlink(missing_ok=True)
                    freed += file.size_bytes
        return freed


class Namespace:
    """Entries of one model, build and KV type. Thread-safe."""

    def __init__(self, store: KVStore, description: str, model: str) -> None:
        self._store = store
        self._description = description
        digest = hashlib.blake2b(description.encode("utf-8", "replace"), digest_size=16)
        self.model = model
        self.folder = store.folder / digest.hexdigest()
        self.about_written = False
        self.tree = EntryTree(self.folder)
        """Entries that are stored or being written. Only the methods change them."""

    def find(self, salt: str, ids: TokenIds32, usable: Usable | None = None) -> Match:
        """Return the entries with the longest prefix of a text. usable: filters entries that are states."""
        return self.tree.longest(root_key(self._description, salt), ids, usable)

    def covered(self, salt: str, ids: TokenIds32) -> tuple[int, bytes]:
        """Return the length of a text's stored prefix, and the key of its last entry."""
        root = root_key(self._description, salt)
        match = self.tree.covering(root, ids)
        return match.tokens, match.entries[-1].key if match.entries else root

    def root(self, salt: str) -> bytes:
        """Return the parent of entries that start a text."""
        return root_key(self._description, salt)

    def whole_prefixes(self, salt: str, ids: TokenIds32) -> tuple[Entry, ...]:
        """Return the states of prefixes of a text."""
        return self.tree.covering(self.root(salt), ids).entries

    def read(self, match: Match) -> ReadBack:
        """Read the entries that `find` returned. Stop at a missing or damaged one, and discard it."""
        payloads: list[memoryview] = []
        now_s = time.time()
        for entry in match.entries:
            path = self.folder / entry.name
            try:
                payloads.append(read_payload(path, entry))
            except (OSError, EntryInvalid):
                self.discard(entry)
                break
            with suppress(OSError):
                os.utime(path, (now_s, now_s))
        return ReadBack(match.entries[: len(payloads)], tuple(payloads))

    def read_exactly(self, salt: str, ids: TokenIds32, owner: str) -> memoryview | None:
        """Return the payload of the entry with exactly these tokens.

        The tokens start a text, and no other entry is looked at. Returns None for a missing or damaged one.
        owner: see `put`.
        """
        parent = self.root(salt)
        entry = make_entry(parent, 0, ids, 0)
        path = self.folder / entry.name
        try:
            payload = read_payload(path, read_head(path))
        except (OSError, EntryInvalid):
            return None
        self.touch([entry])
        if owner:
            self.own(owner, entry.key)
        return payload

    def read_into(self, entry: Entry, out: memoryview) -> bytes | None:
        """Read an entry, and return the checksum that the caller must verify.

        Returns None for a missing or damaged entry, which is discarded.
        """
        try:
            return read_unchecked(self.folder / entry.name, entry, out)
        except (OSError, EntryInvalid):
            self.discard(entry)
            return None

    def discard(self, entry: Entry) -> None:
        """Delete a damaged entry."""
        self.tree.remove(entry)
        self._unlink(entry)

    def touch(self, entries: Sequence[Entry]) -> None:
        """Record in the background that entries were used now."""

        def update() -> None:
            for entry in entries:
                with suppress(OSError):
                    os.utime(self.folder / entry.name)

        self._store.writer.put(update, 0)

    def put(
        self,
        parent: bytes,
        start: int,
        ids: TokenIds32,
        payload: list[memoryview],
        *,
        owner: str,
        earliest: int = 0,
        exact: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Write an entry in the background, call `then` afterwards, and return the entry's key.

        exact: the payload has the bits of a fresh computation. It replaces one that has others.
        """
        size = sum(len(piece) for piece in payload)
        entry = make_entry(parent, start, ids.copy(), size, earliest, exact=exact)
        self.tree.add(entry)

        def write() -> None:
            before_ns = self.tree.changed_ns()
            evictions = self._store.evictions
            ok = self._store.write(self, entry, payload)
            if ok and exact:
                self._unlink(entry._replace(exact=False))
            alone = evictions == self._store.evictions
            self.tree.written(entry, ok=ok, alone_since_ns=before_ns if alone else -2)
            then()
            if ok:
                self._own(owner, entry.key)

        self._store.writer.put(write, size)
        return entry.key

    def own(self, owner: str, key: bytes) -> None:
        """Record in the background that a conversation uses an entry of another one."""
        self._store.writer.put(lambda: self._own(owner, key), 0)

    def _own(self, owner: str, key: bytes) -> None:
        try:
            self._store.owners.add(owner, self.folder.name, key)
        except OSError as error:
            self._store.stop_writing(error)

    def supersede(self, entries: Iterable[Entry]) -> None:
        """Delete entries in the background."""
        for entry in entries:
            self.tree.remove(entry)
            self._store.writer.put(partial(self._unlink, entry), 0)

    def _unlink(self, entry: Entry) -> None:
        with suppress(OSError):
            (self.folder / entry.name).unlink(missing_ok=True)


def _is_reachable(folder: Path, entry: Entry) -> bool:
    """Return whether an entry starts a text or its parent exists.

    If the store is smaller than a text, writing its end may evict its start.
    """
    return not entry.start or any(folder.glob(f"*-{entry.parent.hex()}.*"))


def _used_s(changed_s: float) -> float:
    """Return the time of an entry's last use. 0 for a time in the future.

    A clock that was wrong for a day would protect that day's entries for years.
    """
    if changed_s > time.time() + _PART_AGE_S:
        return 0.0
    return changed_s


def _is_abandoned(changed_s: float) -> bool:
    """Return whether the program that wrote an unfinished file was killed."""
    return abs(time.time() - changed_s) > _PART_AGE_S


def _about(folder: Path) -> About:
    try:
        return msgspec.json.decode((folder / ABOUT_NAME).read_bytes(), type=About)
    except (OSError, msgspec.DecodeError):
        return About("?")
