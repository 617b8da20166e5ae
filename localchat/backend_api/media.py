"""Pictures and recordings inside a prompt.

A prompt is token ids. A stretch that is computed from a picture's embeddings instead has *placeholder* ids,
which are negative. They are a hash of the content and of the place in it, so equal pictures have equal ids and
the prefix caches need to know nothing else. No text and no client can produce a negative id.

The lowest bit of a placeholder is set if a cached text must not end just before it: the pictures of some models
take several tokens for one position, or attend to all of their own tokens at once.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from localchat.errors import LocalchatError


class MediaChunk(Protocol):
    """A stretch of a prompt that is computed from embeddings. It belongs to the backend that made it."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Placeholder ids, one a token."""
        ...

    @property
    def whole(self) -> bool:
        """Whether all of its tokens must be computed in one step."""
        ...

    @property
    def encoded(self) -> bool:
        """Whether its embeddings are in memory."""
        ...


MediaPiece: TypeAlias = tuple[int, ...] | MediaChunk
"""Token ids of markup around a picture, or a stretch of the picture itself."""


class MediaSpan(msgspec.Struct, frozen=True):
    """A chunk in the tokens of a sequence."""

    start: int
    """Index of its first token."""
    chunk: MediaChunk

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.start + len(self.chunk.ids)

    @property
    def divisible(self) -> bool:
        """Whether a cached text may end inside it."""
        return len(self.chunk.ids) < 2 or not self.chunk.ids[1] & 1


class LayoutStore(Protocol):
    """Stores how a model divides attachments into tokens.

    A later process then need not decode them.
    """

    def read(self, digest: bytes) -> bytes | None:
        """Return a stored layout. digest: 32 bytes."""
        ...

    def write(self, digest: bytes, layout: bytes) -> None:
        """Store a layout in the background."""
        ...


class MediaModel(Protocol):
    """Additional method of an open model that reads attachments (ModelInfo.media)."""

    def media_pieces(
        self, kind: str, data: bytes, name: str, *, salt: str, layouts: LayoutStore
    ) -> Sequence[MediaPiece]:
        """Return the tokens of an attachment. kind: `image` or `audio`. data: the encoded file.

        salt: equal files with different salts share nothing. layouts: results of earlier processes.

        From any thread. May wait until the weights are loaded. Raises UsageError for data that cannot be
        decoded, LocalchatError if the encoder cannot be loaded.
        """
        ...


class MediaRunner(Protocol):
    """Additional methods of a runner of such a model. Called from the thread of `launch`."""

    def encode(
        self, chunks: Sequence[MediaChunk], then: Callable[[LocalchatError | None], None]
    ) -> Callable[[], None]:
        """Compute the embeddings of chunks in another thread. Return a function that cancels.

        `then` is called once, from any thread, with None or the reason why it failed. A later row computes the
        chunks. Their embeddings stay in memory as long as the chunks.
        """
        ...


def placeholder_ids(
    content: bytes, tokens: int, *, divisible: bool, index: int = 0
) -> tuple[int, ...]:
    """Return the ids of a stretch of an attachment.

    content: digest of everything that the embeddings depend on. index: number of the stretch. divisible:
    whether a cached text may end inside it.
    """
    stream = hashlib.shake_128(content + index.to_bytes(4, "little")).digest(4 * tokens)
    numbers = struct.unpack(f"<{tokens}I", stream)
    # The highest bit makes an id negative, and the lowest one is free for the mark.
    ids = [(number & 0x7FFFFFFE) - (1 << 31) for number in numbers]
    if not divisible:
        ids[1:] = [id_ + 1 for id_ in ids[1:]]
    return tuple(ids)


def cut_before(ids: Sequence[int], end: int) -> int:
    """Return the last index up to `end` where a cached text may end."""
    while end < len(ids) and ids[end] < 0 and ids[end] & 1:
        end -= 1
    return end


def cut_after(ids: Sequence[int], end: int) -> int:
    """Return the first index from `end` on where a cached text may end."""
    while end < len(ids) and ids[end] < 0 and ids[end] & 1:
        end += 1
    return end


def span_at(spans: Sequence[MediaSpan], index: int) -> MediaSpan | None:
    """Return the span that contains a token."""
    return next((span for span in spans if span.start <= index < span.end), None)
