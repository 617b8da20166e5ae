"""Layouts of attachments on the disk, beside the KV of the texts that contain them.

After a restart, a question about a known picture finds its KV only if its tokens are known. Without its layout,
the picture must be decoded for that, and the encoder loaded.
"""

from concurrent.futures import Future
from typing import Final

import numpy as np

from localchat.kv_store.entry import TokenIds32
from localchat.kv_store.store import Namespace

_SALT: Final = "\0layouts of attachments"
"""Root of their entries, whose tokens are digests."""


class MediaLayouts:
    """The stored layouts of a model. Thread-safe."""

    def __init__(self) -> None:
        self._namespace: Future[Namespace | None] = Future()

    def open(self, namespace: Namespace | None) -> None:
        """Give the entries of the model. None: nothing is stored."""
        self._namespace.set_result(namespace)

    def of(self, owner: str) -> "OwnedLayouts":
        """Return the store for a request. owner: its conversation; empty: nothing new is stored."""
        return OwnedLayouts(self._namespace, owner)


class OwnedLayouts:
    """A LayoutStore. What it writes is deleted with its owner."""

    def __init__(self, namespace: "Future[Namespace | None]", owner: str) -> None:
        self._namespace = namespace
        self._owner = owner

    def read(self, digest: bytes) -> bytes | None:
        """See LayoutStore. Waits until the model is loaded."""
        namespace = self._namespace.result()
        if namespace is None:
            return None
        payload = namespace.read_exactly(_SALT, _ids(digest), self._owner)
        if payload is None:
            return None
        return bytes(payload)

    def write(self, digest: bytes, layout: bytes) -> None:
        """See LayoutStore."""
        namespace = self._namespace.result()
        if namespace is not None and self._owner:
            root = namespace.root(_SALT)
            namespace.put(root, 0, _ids(digest), [memoryview(layout)], owner=self._owner)


def _ids(digest: bytes) -> TokenIds32:
    return np.frombuffer(digest, np.int32)
