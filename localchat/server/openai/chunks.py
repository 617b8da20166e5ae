"""Chunks of OpenAI's chats and plain completions."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from localchat.engine.events import Done, Usage
from localchat.server.errors import ApiError, openai_error
from localchat.server.openai.protocol import Chunk, usage_info
from localchat.server.sse import DONE, event
from localchat.server.timings import answer_timings

_AFTER_CHOICE: Final = b"]}\n\n"
_TEXT_MARK: Final = secrets.token_hex(16)
"""Text that a chunk cannot contain otherwise."""
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The fields that all chunks of an answer repeat."""

    id: str
    kind: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))
    _before_choice: bytes = field(init=False, repr=False)
    """Start of an event with one choice, encoded once per answer."""

    def __post_init__(self) -> None:
        before = event(self.chunk([])).removesuffix(_AFTER_CHOICE)
        object.__setattr__(self, "_before_choice", before)

    def chunk(
        self,
        choices: list[Any],
        usage: Usage | None = None,
        timings: dict[str, Any] | None = None,
        progress: dict[str, float] | None = None,
    ) -> bytes:
        """Return a chunk or a whole answer, as compact JSON."""
        return msgspec.json.encode(
            Chunk(
                self.id,
                self.kind,
                self.created,
                self.model,
                self.fingerprint,
                choices,
                usage_info(usage) if usage else None,
                timings,
                progress,
            )
        )

    def event(self, choice: object) -> bytes:
        """Return an event with one choice."""
        return b"".join((self._before_choice, msgspec.json.encode(choice), _AFTER_CHOICE))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFormatter:
    """Base of OpenAI's formatters: chunks, and the end of a stream.

    The last chunk contains the timings, as in llama.cpp. Many clients read `choices[0]` of every chunk. Without
    a usage chunk, the end of the last choice therefore waits for the timings.
    """

    header: ChunkHeader
    with_usage: bool = False
    with_timings: bool = False
    """Add the metrics of the request to the timings."""
    with_logprobs: bool = False
    unfinished: set[int] = field(default_factory=set)
    """Choices of a stream that have not ended."""
    last_end: list[Any] = field(default_factory=list)
    """The end of the last choice, until the timings are known."""
    _around_text: dict[tuple[int, type], tuple[bytes, bytes]] = field(default_factory=dict)
    """Start and end of the events that differ in one text only, by choice and kind of text."""

    def text_event(
        self, index: int, kind: type, text: str, choice: Callable[[str], object]
    ) -> bytes:
        """Return the event for a piece of text. choice: returns the piece of the choice with a text.

        Its constant parts are encoded once per choice and kind.
        """
        around = self._around_text.get((index, kind))
        if around is None:
            before, after = self.header.event(choice(_TEXT_MARK)).split(_encode(_TEXT_MARK))
            around = self._around_text[index, kind] = (before, after)
        return b"".join((around[0], _encode(text), around[1]))

    def end_event(self, index: int, choice: object) -> bytes:
        """Return the end of a choice, or buffer it until the stream ends."""
        self.unfinished.discard(index)
        if self.with_usage or self.unfinished:
            return self.header.event(choice)
        self.last_end.append(choice)
        return b""

    def finish(self, usage: Usage, done: Done | None) -> bytes:
        """Return the last chunk: usage, timings, and the end of a choice if buffered."""
        if not self.with_usage and not self.last_end:
            return DONE
        timings = answer_timings(usage, done, own=self.with_timings)
        chunk = self.header.chunk(self.last_end, usage if self.with_usage else None, timings)
        return event(chunk) + DONE

    def error(self, error: ApiError) -> bytes:
        return event(openai_error(error))

    def heartbeat(self) -> bytes:
        return b""
