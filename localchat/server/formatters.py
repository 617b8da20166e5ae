"""From what an engine tells to the bytes of an answer: what the exchange asks of every protocol, and the
frame that chat and plain completions share."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from localchat.engine.events import Done, Usage
from localchat.server.error_formats import openai_error
from localchat.server.errors import ApiError
from localchat.server.generation import OutputEvent
from localchat.server.openai.protocol import Chunk, timings_info, usage_info
from localchat.server.sse import DONE, event


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """What is the same in every chunk of one answer."""

    id: str
    kind: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(
        self,
        choices: list[Any],
        usage: Usage | None = None,
        timings: Done | None = None,
    ) -> bytes:
        """Compact JSON."""
        return msgspec.json.encode(
            Chunk(
                self.id,
                self.kind,
                self.created,
                self.model,
                self.fingerprint,
                choices,
                usage_info(usage) if usage else None,
                timings_info(timings) if timings else None,
            )
        )

    def event(self, choice: object) -> bytes:
        """One event with one choice."""
        return event(self.chunk([choice]))


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFormatter:
    """What the streams of chat and of plain completions have in common: how they end."""

    frame: ChunkHeader
    with_usage: bool = False
    with_timings: bool = False
    with_logprobs: bool = False

    def ending(self, usage: Usage, done: Done | None) -> bytes:
        timings = done if self.with_timings else None
        if not self.with_usage and timings is None:
            return DONE
        return event(self.frame.chunk([], usage if self.with_usage else None, timings)) + DONE

    def broken(self, error: ApiError) -> bytes:
        return event(openai_error(error))

    def alive(self) -> bytes:
        return b""


class StreamFormatter(Protocol):
    """Turns what is told into events."""

    def opening(self, choices: int, prompt_tokens: int) -> bytes:
        """Events that come before the first token. `prompt_tokens`: of all prompts together."""
        ...

    def told(self, told: OutputEvent) -> bytes:
        """Whole events; none at all for what this reader did not ask for."""
        ...

    def ending(self, usage: Usage, done: Done | None) -> bytes:
        """What comes behind the last choice, to the end of the stream."""
        ...

    def broken(self, error: ApiError) -> bytes:
        """What ends the stream in place of `ending`, after a failure."""
        ...

    def alive(self) -> bytes:
        """An event that says no more than that the server is there; empty where the protocol has none."""
        ...


class ResponseFormatter(Protocol):
    """Collects what is told into one response."""

    def take(self, told: OutputEvent) -> None: ...

    def result(self, usage: Usage, done: Done | None) -> bytes: ...
