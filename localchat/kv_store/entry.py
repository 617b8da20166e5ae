"""File format of one entry: the KV of a stretch of tokens, named by what it holds.

An entry continues another one, its parent, or begins a text. Its key is a hash of the parent's key and its own
token ids, and the first parent is a hash of the model, the build and the salt; so a key says all that decides
the KV, equal beginnings have one file, and a text under another salt has no key in common. A file never
changes: it is written beside its place, then renamed. It is not flushed to the disk, because a torn file
fails its checksum and is a miss.

Nothing is compressed: of KV in f16 zlib at its fastest wins 7 %, at 24 MB/s. The checksum is against damage,
not against an enemy, and must not cost more than reading: memory is passed over once, each chunk while it is
still in the cache, without Python's lock. Words of 64 bits are added eight by eight, 4 KB apart; of this grid,
an eighth in size, the sums of all rows and all columns are hashed. A row has an odd number of words, so no two
of the eight lie alike in a line of 64 bytes, and lines that changed places show.
"""

import hashlib
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds32: TypeAlias = npt.NDArray[np.int32]

SUFFIX = ".kv"
PART_SUFFIX = ".part"
KEY_BYTES = 16
_MAGIC = b"LCKV\0\0\0\3"
_DIGEST_BYTES = 16
_GROUP = (8, 509)
"""Words whose columns are added: rows and columns."""
_GROUP_BYTES = 8 * 8 * 509
_CHUNK_BYTES = 32 * _GROUP_BYTES
"""1 MB: what was just read is in the L2 cache; smaller chunks cost more calls than they save."""
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
    fixed = _FIXED.pack(
        entry.parent, entry.key, entry.start, len(entry.ids), entry.earliest, entry.payload_bytes
    )
    ids = entry.ids.astype("<i4").tobytes()
    digest = hashlib.sha256(fixed + ids)
    for chunk in _chunks(payload[0] if len(payload) == 1 else memoryview(b"".join(payload))):
        _add(digest, chunk)
    temporary = folder / f".{secrets.token_hex(8)}{PART_SUFFIX}"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + digest.digest()[:_DIGEST_BYTES] + fixed + ids)
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
    read_payload_into(path, wanted, payload)
    return payload


def read_payload_into(path: Path, wanted: Entry, out: memoryview) -> None:
    """Read the payload of an entry into `out`, of its length; after an error that holds anything.

    Raises EntryInvalid, OSError.
    """
    with path.open("rb", buffering=0) as file:
        head = file.read(_HEAD_BYTES + 4 * len(wanted.ids))
        if os.fstat(file.fileno()).st_size != len(head) + len(out):
            raise EntryInvalid(path)
        found = _entry(path.name, head[:_HEAD_BYTES], head[_HEAD_BYTES:])
        if found[:2] != wanted[:2] or found[-2:] != (wanted.earliest, len(out)):
            raise EntryInvalid(path)
        digest = hashlib.sha256(head[len(_MAGIC) + _DIGEST_BYTES :])
        for chunk in _chunks(out):
            if file.readinto(chunk) != len(chunk):
                raise EntryInvalid(path)
            _add(digest, chunk)
    if digest.digest()[:_DIGEST_BYTES] != head[len(_MAGIC) : len(_MAGIC) + _DIGEST_BYTES]:
        raise EntryInvalid(path)


def _chunks(payload: memoryview) -> Iterator[memoryview]:
    return (payload[at : at + _CHUNK_BYTES] for at in range(0, len(payload), _CHUNK_BYTES))


def _add(digest: "hashlib._Hash", chunk: memoryview) -> None:
    """Take a chunk of the payload into a checksum."""
    whole = len(chunk) // _GROUP_BYTES * _GROUP_BYTES
    words = np.frombuffer(chunk[:whole], np.uint64)
    grid = np.add.reduce(words.reshape(-1, *_GROUP), axis=1)
    digest.update(np.add.reduce(grid, axis=0))
    digest.update(np.add.reduce(grid, axis=1))
    digest.update(chunk[whole:])


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
