"""File format of one entry: the KV of a stretch of tokens, named by what it holds.

An entry continues another one, its parent, or begins a text. Its key is a hash of the parent's key and its own
token ids, and the first parent is a hash of the model, the build and the salt; so a key says all that decides
the KV, equal beginnings have one file, and a text under another salt has no key in common. A file never
changes: it is written beside its place, then renamed. It is not flushed to the disk, because a torn file
fails its checksum and is a miss.

Nothing is compressed: of KV in f16 zlib at its fastest wins 7 %, at 24 MB/s. The checksum is a hash of the
payload's sums (checksum.py), which may be added where the payload goes.
"""

import hashlib
import os
import secrets
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from localchat.kv_store.checksum import payload_sums

TokenIds32: TypeAlias = npt.NDArray[np.int32]

SUFFIX = ".kv"
PART_SUFFIX = ".part"
KEY_BYTES = 16
_MAGIC = b"LCKV\0\0\0\4"
_DIGEST_BYTES = 16
_FIXED = struct.Struct("<16s16sIIIQ")
_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES + _FIXED.size


class EntryInvalid(Exception):
    """A file that is no whole entry of its name: torn, damaged, foreign or of another version."""


class Entry(NamedTuple):
    """One stretch of tokens."""

    parent: bytes
    key: bytes
    start: int
    """Position of its first token."""
    ids: TokenIds32
    earliest: int
    """Lowest position that the payload holds (above `start` where a sliding window moved on)."""
    payload_bytes: int

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
        return f"{self.parent.hex()}-{self.key.hex()}{SUFFIX}"


def root_key(namespace: str, salt: str) -> bytes:
    """The parent of entries that begin a text. `namespace`: all that decides KV besides the tokens."""
    text = f"{len(namespace)}\0{namespace}\0{salt}"
    return _hash(b"root", text.encode("utf-8", "surrogatepass"))


def make_entry(
    parent: bytes, start: int, ids: TokenIds32, payload_bytes: int, earliest: int = 0
) -> Entry:
    """An entry with the key that belongs to its content."""
    key = entry_key(parent, start, ids.astype("<i4").tobytes())
    return Entry(parent, key, start, ids, earliest, payload_bytes)


def entry_key(parent: bytes, start: int, ids: bytes) -> bytes:
    """The name of the tokens from `start` on behind what `parent` names. `ids`: 4 bytes each."""
    return _hash(b"entry", parent + start.to_bytes(8, "little") + ids)


def _hash(purpose: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES, person=purpose).digest()


def keys_of(name: str) -> tuple[bytes, bytes] | None:
    """Parent and key of a file by its name; None: no entry's name."""
    stem, _, suffix = name.partition(".")
    parent, _, key = stem.partition("-")
    if f".{suffix}" != SUFFIX or len(parent) != 2 * KEY_BYTES or len(key) != 2 * KEY_BYTES:
        return None
    try:
        return bytes.fromhex(parent), bytes.fromhex(key)
    except ValueError:
        return None


def write_entry(folder: Path, entry: Entry, payload: Sequence[memoryview]) -> None:
    """Write an entry for its owner alone, at once as a whole. Raises OSError.

    `payload`: pieces that follow each other.
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
    """Position and tokens of an entry, without its payload. Raises EntryInvalid, OSError."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        count = _fixed(head)[3]
        if count > path.stat().st_size:
            raise EntryInvalid(path)
        return _entry(path.name, head, file.read(4 * count))


def read_payload(path: Path, wanted: Entry) -> memoryview:
    """The payload of an entry, after all checks. Raises EntryInvalid, OSError, MemoryError."""
    if wanted.payload_bytes > path.stat().st_size:
        raise EntryInvalid(path)
    payload = memoryview(bytearray(wanted.payload_bytes))
    if read_unchecked(path, wanted, payload) != checksum(wanted, payload_sums(payload)):
        raise EntryInvalid(path)
    return payload


def read_unchecked(path: Path, wanted: Entry, out: memoryview) -> bytes:
    """Read the payload of an entry into `out`, of its length; after an error that holds anything.

    Returns the checksum that the payload must have. Raises EntryInvalid, OSError.
    """
    described = _described(wanted)
    begin = bytearray(len(_MAGIC) + _DIGEST_BYTES + len(described))
    if _read(path, begin, out) != len(begin) + len(out):
        raise EntryInvalid(path)
    if not begin.startswith(_MAGIC) or not begin.endswith(described):
        raise EntryInvalid(path)
    return bytes(begin[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES])


def _read(path: Path, begin: bytearray, out: memoryview) -> int:
    """Fill both from a file, by one call where the system has it: each reader waits for Python's lock after
    every call. Returns the bytes read, one more than asked for where the file is longer."""
    more = bytearray(1)
    if sys.platform == "win32":
        with path.open("rb", buffering=0) as file:
            done = file.readinto(begin)
            while 0 <= (at := done - len(begin)) <= len(out) and (
                got := file.readinto(out[at:] or more)
            ):
                done += got
            return done
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = os.preadv(descriptor, (begin, out, more), 0)
        # One call reads 2 GB at most.
        while len(begin) <= done < len(begin) + len(out):
            got = os.preadv(descriptor, (out[done - len(begin) :], more), done)
            if not got:
                break
            done += got
        return done
    finally:
        os.close(descriptor)


def checksum(entry: Entry, sums: bytes) -> bytes:
    """What the file of an entry says against damage. `sums`: those of its payload."""
    return hashlib.sha256(_described(entry) + sums).digest()[:_DIGEST_BYTES]


def _described(entry: Entry) -> bytes:
    """What a file says of its entry in front of the payload."""
    fixed = _FIXED.pack(
        entry.parent, entry.key, entry.start, len(entry.ids), entry.earliest, entry.payload_bytes
    )
    return fixed + entry.ids.astype("<i4").tobytes()


def _fixed(head: bytes) -> tuple[bytes, bytes, int, int, int, int]:
    if len(head) != _HEAD_BYTES or not head.startswith(_MAGIC):
        raise EntryInvalid("no entry of this version")
    parent, key, start, count, earliest, size = _FIXED.unpack_from(head, len(_MAGIC) + 16)
    return parent, key, start, count, earliest, size


def _entry(name: str, head: bytes, ids_bytes: bytes) -> Entry:
    parent, key, start, count, earliest, size = _fixed(head)
    if not count or len(ids_bytes) != 4 * count:
        raise EntryInvalid(name)
    ids = np.frombuffer(ids_bytes, "<i4").astype(np.int32)
    if keys_of(name) != (parent, key) or entry_key(parent, start, ids_bytes) != key:
        raise EntryInvalid(name)
    return Entry(parent, key, start, ids, earliest, size)
