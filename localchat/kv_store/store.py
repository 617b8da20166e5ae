"""KVStore: entries of all models in one folder, bounded in bytes. Nothing in it is needed: all may be lost.

A full or read-only disk ends the writing with one notice. What cannot be read is a miss.
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
    SUFFIX,
    Entry,
    EntryInvalid,
    TokenIds32,
    keys_of,
    make_entry,
    read_payload,
    read_unchecked,
    root_key,
    write_entry,
)
from localchat.kv_store.eviction import MOST_FILES, StoredFile, victims
from localchat.kv_store.owners import Owners, with_ancestors
from localchat.kv_store.tree import EntryTree, Match, Usable
from localchat.kv_store.writer import Writer

ABOUT_NAME = "about.json"
FREE_SHARE = 0.25
"""Most of the disk that entries take: this share of what would be free without them."""
_PART_AGE_S = 60.0
"""A part that nobody wrote to for so long was left by a program that was killed."""
_BATCH_BYTES = 64_000_000
_SHARE = 8
"""Part of the bound that is made free at once: listing thousands of files takes 30 ms of Python's lock."""
_MOST_UNCHECKED_BYTES = 2_000_000_000
"""Written between two looks at the bound, and at what else fills the disk."""


class About(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a namespace's folder says of itself, for listings and evictions."""

    model: str
    seconds_per_byte: float = 1e-7


class NamespaceSummary(NamedTuple):
    """One model's part of the store."""

    folder: str
    model: str
    entries: int
    size_bytes: int
    used_s: float
    """When one of its entries was last used; seconds since 1970."""


class ReadBack(NamedTuple):
    """Entries that were read, and their payloads."""

    entries: tuple[Entry, ...]
    payloads: tuple[memoryview, ...]


class KVStore:
    """The folder as a whole. Callable from any thread."""

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
        """Bytes that may be written before the next look at the bound."""
        self.owners = Owners(folder)
        self.writer = Writer()
        self.written_bytes = 0
        self.evictions = 0

    @property
    def writable(self) -> bool:
        """Whether new entries are still taken."""
        return self._writable and self._limit_bytes > 0

    def namespace(self, description: str, model: str) -> "Namespace":
        """The entries of one model, build and KV type, which `description` names in full."""
        return Namespace(self, description, model)

    # ------------------------------------------------------------------------ writing

    def write(self, namespace: "Namespace", entry: Entry, payload: list[memoryview]) -> bool:
        """Write an entry now. False: there is no room for it, or the disk cannot be written."""
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
            self.written_bytes += size
        except OSError as error:
            self.stop_writing(error)
            return False
        return True

    def stop_writing(self, error: OSError) -> None:
        """Write nothing more, and say so once."""
        with self._lock:
            first = self._writable
            self._writable = False
        if first:
            why = error.strerror or type(error).__name__
            self._notify(f"Conversations are not kept ready on the disk: {why} ({self.folder}).")

    def _make_folder(self, namespace: "Namespace") -> None:
        if namespace.about_written:
            return
        for folder in (self.folder, namespace.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = msgspec.json.encode(About(namespace.model, namespace.seconds_per_byte))
        path = namespace.folder / ABOUT_NAME
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(about)
        namespace.about_written = True

    def allowed_bytes(self, held_bytes: int) -> int:
        """Most bytes that entries may take now, of which they hold `held_bytes`."""
        free = self._free_bytes(self.folder)
        return min(self._limit_bytes, int((free + held_bytes) * FREE_SHARE))

    def make_room(self, wanted_bytes: int) -> int:
        """Bytes that may be written before the next call, after deleting what is least useful where they are
        few; 0 where `wanted_bytes` do not fit. Raises OSError.

        Another program may write as many: half of what is free.
        """
        files = list(self.files())
        held = sum(file.size_bytes for file in files)
        allowed = self.allowed_bytes(held)
        least = 2 * wanted_bytes + min(_BATCH_BYTES, self._limit_bytes // (2 * _SHARE))
        if allowed < least:
            return 0
        if held > allowed - least or len(files) > MOST_FILES:
            kept = max(0, allowed - max(least, self._limit_bytes // _SHARE))
            for file in victims(files, kept, time.time()):
                file.path.unlink(missing_ok=True)
                self.evictions += 1
                held -= file.size_bytes
        return min((allowed - held) // 2, _MOST_UNCHECKED_BYTES)

    # ------------------------------------------------------------------------ the whole

    def files(self) -> Iterator[StoredFile]:
        """All entries, by their names and dates. Parts that a killed program left are deleted."""
        for folder in self._folders():
            rate = _about(folder).seconds_per_byte
            with suppress(OSError), os.scandir(folder) as found:
                for one in found:
                    keys = keys_of(one.name)
                    try:
                        state = one.stat()
                    except OSError:
                        continue  # another program deleted it
                    if keys is not None:
                        path = Path(one.path)
                        yield StoredFile(path, *keys, state.st_size, state.st_mtime, rate)
                    elif one.name.endswith(PART_SUFFIX) and _is_left(state.st_mtime):
                        Path(one.path).unlink(missing_ok=True)

    def _folders(self) -> list[Path]:
        try:
            return sorted(one for one in self.folder.iterdir() if (one / ABOUT_NAME).is_file())
        except OSError:
            return []

    def summaries(self) -> list[NamespaceSummary]:
        """What is kept of each model, the last used first."""
        found: dict[Path, list[StoredFile]] = {}
        for file in self.files():
            found.setdefault(file.path.parent, []).append(file)
        lines = [
            NamespaceSummary(
                folder.name,
                _about(folder).model,
                len(files),
                sum(file.size_bytes for file in files),
                max(file.used_s for file in files),
            )
            for folder, files in found.items()
        ]
        return sorted(lines, key=lambda line: -line.used_s)

    def clear(self, model: str = "") -> int:
        """Delete everything, or what is kept of one model. Returns the bytes; raises OSError."""
        freed = 0
        for line in self.summaries():
            freed += line.size_bytes if not model or line.model == model else 0
        for folder in self._folders():
            if not model or _about(folder).model == model:
                shutil.rmtree(folder)
        if not model and self.folder.is_dir():
            shutil.rmtree(self.folder)
        return freed

    def forget(self, owner: str) -> int:
        """Delete what only this conversation had. Returns the bytes; raises OSError."""
        mine = self.owners.take(owner)
        freed = 0
        others = self.owners.of_all()
        for namespace, keys in mine.items():
            folder = self.folder / namespace
            files = [file for file in self.files() if file.path.parent == folder]
            parents = {file.key: file.parent for file in files}
            kept = with_ancestors(others.get(namespace, set()), parents)
            gone = with_ancestors(keys, parents) - kept
            for file in files:
                if file.key in gone:
                    file.path.unlink(missing_ok=True)
                    freed += file.size_bytes
        return freed


class Namespace:
    """Entries of one model, build and KV type. Callable from any thread."""

    def __init__(self, store: KVStore, description: str, model: str) -> None:
        self._store = store
        self._description = description
        digest = hashlib.blake2b(description.encode("utf-8", "replace"), digest_size=16)
        self.model = model
        self.folder = store.folder / digest.hexdigest()
        self.seconds_per_byte = About("").seconds_per_byte
        self.about_written = False
        self._tree = EntryTree(self.folder)

    def find(self, salt: str, ids: TokenIds32, usable: Usable | None = None) -> Match:
        """What is kept of a text's beginning. usable: for entries that are whole states."""
        return self._tree.longest(root_key(self._description, salt), ids, usable)

    def covered(self, salt: str, ids: TokenIds32) -> tuple[int, bytes]:
        """Tokens of a text that need not be written, and the key of the entry that its rest continues."""
        root = root_key(self._description, salt)
        match = self._tree.covering(root, ids)
        return match.tokens, match.entries[-1].key if match.entries else root

    def root(self, salt: str) -> bytes:
        """The parent of entries that begin a text."""
        return root_key(self._description, salt)

    def whole_prefixes(self, salt: str, ids: TokenIds32) -> tuple[Entry, ...]:
        """Whole states of a text's beginnings."""
        return self._tree.covering(self.root(salt), ids).entries

    def read(self, match: Match) -> ReadBack:
        """Read what `find` found, up to the first entry that is gone or damaged, which no longer counts."""
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

    # ------------------------------------------------------------------------ entries of one length

    def has(self, parent: bytes, key: bytes) -> bool:
        """Whether an entry is kept or is being written."""
        return self._tree.has(parent, key)

    def chain(
        self, parent: bytes, start: int, ids: TokenIds32, size: int, payload_bytes: int
    ) -> list[Entry]:
        """Entries of `size` tokens each that hold a text from `start` on, where `parent` ends."""
        return self._tree.chain(parent, start, ids, size, payload_bytes)

    def read_into(self, entry: Entry, out: memoryview) -> bytes | None:
        """Read one entry whose payload is checked by the caller: it must have the checksum that is returned.

        None: it is gone or damaged, and no longer counts.
        """
        try:
            return read_unchecked(self.folder / entry.name, entry, out)
        except (OSError, EntryInvalid):
            self.discard(entry)
            return None

    def discard(self, entry: Entry) -> None:
        """Delete an entry that is damaged."""
        self._tree.remove(entry)
        self._unlink(entry)

    def touch(self, entries: Sequence[Entry]) -> None:
        """Note behind the answers that entries were used now."""

        def note() -> None:
            for entry in entries:
                with suppress(OSError):
                    os.utime(self.folder / entry.name)

        self._store.writer.put(note, 0)

    # ------------------------------------------------------------------------ writing

    def put(
        self,
        parent: bytes,
        start: int,
        ids: TokenIds32,
        payload: list[memoryview],
        *,
        owner: str,
        earliest: int = 0,
        then: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Write an entry behind the answers, and call `then` when that has ended. Returns its key."""
        size = sum(len(piece) for piece in payload)
        entry = make_entry(parent, start, ids.copy(), size, earliest)
        self._tree.add(entry)

        def write() -> None:
            before_ns = self._tree.changed_ns()
            evictions = self._store.evictions
            ok = self._store.write(self, entry, payload)
            alone = evictions == self._store.evictions
            self._tree.written(entry, ok=ok, alone_since_ns=before_ns if alone else -2)
            then()
            if ok:
                self._own(owner, entry.key)

        self._store.writer.put(write, size)
        return entry.key

    def own(self, owner: str, key: bytes) -> None:
        """Note behind the answers that a conversation has what another one wrote."""
        self._store.writer.put(lambda: self._own(owner, key), 0)

    def _own(self, owner: str, key: bytes) -> None:
        try:
            self._store.owners.add(owner, self.folder.name, key)
        except OSError as error:
            self._store.stop_writing(error)

    def supersede(self, entries: Iterable[Entry]) -> None:
        """Delete entries behind the answers."""
        for entry in entries:
            self._tree.remove(entry)
            self._store.writer.put(partial(self._unlink, entry), 0)

    def _unlink(self, entry: Entry) -> None:
        with suppress(OSError):
            (self.folder / entry.name).unlink(missing_ok=True)


def _is_reachable(folder: Path, entry: Entry) -> bool:
    """Whether an entry begins a text, or what it continues is there: in a store smaller than a text, a text's
    beginning goes for its end."""
    return not entry.start or any(folder.glob(f"*-{entry.parent.hex()}{SUFFIX}"))


def _is_left(changed_s: float) -> bool:
    """Whether the program that wrote a part to this moment is gone."""
    return time.time() - changed_s > _PART_AGE_S


def _about(folder: Path) -> About:
    try:
        return msgspec.json.decode((folder / ABOUT_NAME).read_bytes(), type=About)
    except (OSError, msgspec.DecodeError):
        return About("?")
