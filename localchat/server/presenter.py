"""From what an engine tells to the bytes of an answer: the frame that chat and plain completions share."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from localchat.engine.events import Done, Usage
from localchat.server.answering import Told
from localchat.server.replies import Chunk, timings_reply, usage_reply
from localchat.server.sse import event


@dataclass(frozen=True, slots=True)
class Frame:
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
                usage_reply(usage) if usage else None,
                timings_reply(timings) if timings else None,
            )
        )

    def event(self, choice: object) -> bytes:
        """One event with one choice."""
        return event(self.chunk([choice]))


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


class StreamPresenter(Protocol):
    """Turns what is told into events."""

    def opening(self, choices: int) -> bytes: ...

    def told(self, told: Told) -> bytes:
        """Whole events; none at all for what this reader did not ask for."""
        ...

    def ending(self, usage: Usage, done: Done | None) -> bytes:
        """What comes between the last choice and `[DONE]`."""
        ...


class WholePresenter(Protocol):
    """Collects what is told into one response."""

    def take(self, told: Told) -> None: ...

    def result(self, usage: Usage, done: Done | None) -> bytes: ...
