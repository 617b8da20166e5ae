"""Texts in a store of KV, with payloads that depend on every token before them.

As a program it writes for ever: `kv_texts.py FOLDER SEARCH_PATH FIRST_NUMBER`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:] = sys.argv[2].split(":")

import numpy as np

from localchat.kv_store.entry import TokenIds32
from localchat.kv_store.store import KVStore, Namespace

STRETCH = 8


def ids_of(text: str) -> TokenIds32:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def payload_of(text: str, start: int, end: int) -> bytes:
    """A payload that depends on all tokens before it, as KV does."""
    return f"{text[:end]}|{start}".encode() * 3


def keep(namespace: Namespace, text: str, salt: str = "", owner: str = "") -> None:
    """Write what is not kept of a text, in stretches."""
    start, parent = namespace.covered(salt, ids_of(text))
    namespace.own(owner, parent)
    while start < len(text):
        end = min(start - start % STRETCH + STRETCH, len(text))
        payload = [memoryview(payload_of(text, start, end))]
        parent = namespace.put(parent, start, ids_of(text[start:end]), payload, owner=owner)
        start = end


def write_for_ever(folder: Path, first: int) -> None:
    """Keep ten texts in turns, within 3 MB."""
    store = KVStore(folder, 3_000_000)
    namespace = store.namespace("model", "m")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for number in range(1 << 30):
        keep(namespace, f"{first + number % 10:05}" + "z" * 400)
        store.writer.drain(60)


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), int(sys.argv[3]))
