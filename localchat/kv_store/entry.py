"""File format of an entry: the KV of a run of tokens.

An entry continues its parent, or starts a text. Its key is a hash of the parent's key and its own token ids.
The first parent is a hash of the model, the build and the salt. So the key covers everything that determines
the KV, equal prefixes share a file, and texts with different salts share nothing.

A file never changes. It is written under a temporary name and renamed. It is not flushed to disk, because an
incomplete file fails its checksum and counts as a miss. Nothing is compressed: zlib at its fastest saves 7 % of
KV in f16, at 24 MB/s. The checksum is a hash of the payload's sums (checksum.py), which a device may compute.
"""

import hashlib
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from localchat.kv_store.checksum import payload_sums

TokenIds32: TypeAlias = npt.NDArray[np.int32]

SUFFIX = ".kv"
_EXACT_SUFFIX = f".exact{SUFFIX}"
PART_SUFFIX = ".part"
KEY_BYTES = 16
_MAGIC = b"LCKV\0\0\0\5"
_DIGEST_BYTES = 16
_FIXED = struct.Struct("<16s16sIIIQ?")
_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES + _FIXED.size


class EntryInvalid(Exception):
    """Raised for a file that is incomplete, damaged, misnamed or of another version."""


class Entry(NamedTuple):
    """KV of a run of tokens."""

    parent: bytes
    key: bytes
    start: int
    """Position of its first token."""
    ids: TokenIds32
    earliest: int
    """Lowest position in the payload, above `start` if a sliding window has moved on."""
    payload_bytes: int
    exact: bool = False
    """The payload has the bits of a fresh computation."""

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.ids)

    @property
    def file_bytes(self) -> int:
        """Size of its file."""
        return _HEAD_BYTES + 4 * len(self.ids) + self.payload_bytes

    @property
    def name(self) -> str:
        """Name of its file."""
        return name_of(self.parent, self.key, exact=self.exact)


def root_key(namespace: str, salt: str) -> bytes:
    """Return the parent of entries that start a text.

    namespace: everything that determines the KV besides the tokens.
    """
    text = f"{len(namespace)}\0{namespace}\0{salt}"
    return _hash(b"root", text.encode("utf-8", "surrogatepass"))


def make_entry(
    parent: bytes,
    start: int,
    ids: TokenIds32,
    payload_bytes: int,
    earliest: int = 0,
    *,
    exact: bool = False,
) -> Entry:
    """Return an entry with the key of its content."""
    key = entry_key(parent, start, ids.astype("<i4").tobytes())
    return Entry(parent, key, start, ids, earliest, payload_bytes, exact)


def entry_key(parent: bytes, start: int, ids: bytes) -> bytes:
    """Return the key of tokens that continue `parent` from `start` on. ids: 4 bytes each."""
    return _hash(b"entry", parent + start.to_bytes(8, "little") + ids)


def _hash(purpose: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES, person=purpose).digest()


def name_of(parent: bytes, key: bytes, *, exact: bool) -> str:
    """Return the name of an entry's file."""
    suffix = _EXACT_SUFFIX if exact else SUFFIX
    return f"{parent.hex()}-{key.hex()}{suffix}"


def is_exact(name: str) -> bool:
    """Return whether an entry with this file name has the bits of a fresh computation."""
    return name.endswith(_EXACT_SUFFIX)


def keys_of(name: str) -> tuple[bytes, bytes] | None:
    """Return the parent and the key in a file name. None if it is not the name of an entry."""
    stem, _, suffix = name.partition(".")
    parent, _, key = stem.partition("-")
    if (
        f".{suffix}" not in (SUFFIX, _EXACT_SUFFIX)
        or len(parent) != 2 * KEY_BYTES
        or len(key) != 2 * KEY_BYTES
    ):
        return None
    try:
        return bytes.fromhex(parent), bytes.fromhex(key)
    except ValueError:
        return None


def write_entry(folder: Path, entry: Entry, payload: Sequence[memoryview]) -> None:
    """Write an entry atomically, readable for the user only. Raises OSError.

    payload: consecutive pieces.
    """
    sums = payload_sums(payload[0] if len(payload) == 1 else memoryview(b"".join(payload)))
    temporary = folder / f".{secrets.token_hex(8)}{PART_SUFFIX}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + checksum(entry, sums) + _described(entry))
            for piece in payload:
                file.write(piece)
        temporary.replace(folder / entry.name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_head(path: Path) -> Entry:
    """Return an entry without reading its payload. Raises EntryInvalid, OSError."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        count = _fixed(head)[3]
        if count > path.stat().st_size:
            raise EntryInvalid(path)
        return _entry(path.name, head, file.read(4 * count))


def read_payload(path: Path, entry: Entry) -> memoryview:
    """Return the verified payload of an entry. Raises EntryInvalid, OSError, MemoryError."""
    if entry.payload_bytes > path.stat().st_size:
        raise EntryInvalid(path)
    payload = memoryview(bytearray(entry.payload_bytes))
    if read_unchecked(path, entry, payload) != checksum(entry, payload_sums(payload)):
        raise EntryInvalid(path)
    return payload


def read_unchecked(path: Path, entry: Entry, out: memoryview) -> bytes:
    """Read the payload of an entry into `out`, and return its expected checksum.

    After an error, the content of `out` is undefined. Raises EntryInvalid, OSError.
    """
    description = _described(entry)
    head = bytearray(len(_MAGIC) + _DIGEST_BYTES + len(description))
    if _read(path, head, out) != len(head) + len(out):
        raise EntryInvalid(path)
    if not head.startswith(_MAGIC) or not head.endswith(description):
        raise EntryInvalid(path)
    return bytes(head[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES])


def _read(path: Path, head: bytearray, out: memoryview) -> int:
    """Fill both buffers from a file, and return the number of bytes read.

    It is one more if the file is longer. Uses a single call if possible, because each call waits for Python's
    lock again.
    """
    surplus = bytearray(1)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = os.preadv(descriptor, (head, out, surplus), 0)
        # One call reads at most 2 GB.
        while len(head) <= done < len(head) + len(out):
            count = os.preadv(descriptor, (out[done - len(head) :], surplus), done)
            if not count:
                break
            done += count
        return done
    finally:
        os.close(descriptor)


def checksum(entry: Entry, sums: bytes) -> bytes:
    """Return the checksum that detects a damaged entry file. sums: the sums of its payload."""
    return hashlib.sha256(_described(entry) + sums).digest()[:_DIGEST_BYTES]


def _described(entry: Entry) -> bytes:
    """Return the description of an entry that precedes the payload in its file."""
    fixed = _FIXED.pack(
        entry.parent,
        entry.key,
        entry.start,
        len(entry.ids),
        entry.earliest,
        entry.payload_bytes,
        entry.exact,
    )
    return fixed + entry.ids.astype("<i4").tobytes()


def _fixed(head: bytes) -> tuple[bytes, bytes, int, int, int, int, bool]:
    if len(head) != _HEAD_BYTES or not head.startswith(_MAGIC):
        raise EntryInvalid("no entry of this version")
    parent, key, start, count, earliest, size, exact = _FIXED.unpack_from(head, len(_MAGIC) + 16)
    return parent, key, start, count, earliest, size, exact


def _entry(name: str, head: bytes, ids_bytes: bytes) -> Entry:
    parent, key, start, count, earliest, size, exact = _fixed(head)
    if not count or len(ids_bytes) != 4 * count:
        raise EntryInvalid(name)
    ids = np.frombuffer(ids_bytes, "<i4").astype(np.int32)
    if name != name_of(parent, key, exact=exact) or entry_key(parent, start, ids_bytes) != key:
        raise EntryInvalid(name)
    return Entry(parent, key, start, ids, earliest, size, exact)
