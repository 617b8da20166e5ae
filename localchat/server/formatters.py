"""AnswerFormatter, the interface that writes an answer in a protocol, and parts that formatters share."""

import secrets
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from localchat.engine.events import Done, Usage
from localchat.server.chat.content_blocks import CollectedAnswer
from localchat.server.errors import ApiError
from localchat.server.generation import OutputEvent


class AnswerFormatter(Protocol):
    """Writes one answer in a protocol, as a stream of events or as a response."""

    def start(self, choices: int, prompt_tokens: int) -> bytes:
        """Return the events before the first token. `prompt_tokens`: sum of all prompts."""
        ...

    def event(self, event: OutputEvent) -> bytes:
        """Return complete events for an output event; empty if the client did not request it."""
        ...

    def finish(self, usage: Usage, done: Done | None) -> bytes:
        """Return the events after the last choice, up to the end of the stream."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed, instead of `finish`."""
        ...

    def heartbeat(self) -> bytes:
        """Return an event without content; empty if the protocol has none."""
        ...

    def response(self, answer: CollectedAnswer, usage: Usage, done: Done | None) -> bytes:
        """Return the whole answer as one JSON object."""
        ...


def new_id(prefix: str) -> str:
    """Return a random id with this prefix."""
    return f"{prefix}{secrets.token_hex(12)}"


def utc_time(seconds: float) -> str:
    """Return a time of the Unix clock as text, such as `2026-01-31T12:00:00Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def json_response(value: Any) -> Response:  # noqa: ANN401 - any JSON
    """Return a response of compact JSON."""
    body = msgspec.json.encode(value)
    return Response(body, headers={"content-type": "application/json"})
