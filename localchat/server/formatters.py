"""Answer formatters: the interface that writes an answer in a protocol, and shared parts."""

import secrets
from typing import Any, Protocol

import msgspec
from starlette.responses import Response

from localchat.engine.events import Done, Usage
from localchat.server.chat.content_blocks import CollectedAnswer
from localchat.server.errors import ApiError
from localchat.server.generation import OutputEvent


class AnswerFormatter(Protocol):
    """Writes one answer in a protocol, as events of a stream or as one response."""

    def start(self, choices: int, prompt_tokens: int) -> bytes:
        """Events before the first token. `prompt_tokens`: of all prompts together."""
        ...

    def event(self, event: OutputEvent) -> bytes:
        """Complete events for one output event; empty if the client did not ask for it."""
        ...

    def finish(self, usage: Usage, done: Done | None) -> bytes:
        """Events after the last choice, to the end of the stream."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The end of a stream that failed, in place of `finish`."""
        ...

    def heartbeat(self) -> bytes:
        """An event without content; empty if the protocol has none."""
        ...

    def response(self, answer: CollectedAnswer, usage: Usage, done: Done | None) -> bytes:
        """The whole answer as one JSON object."""
        ...


def new_id(prefix: str) -> str:
    """A random id with this prefix."""
    return f"{prefix}{secrets.token_hex(12)}"


def json_response(value: Any) -> Response:  # noqa: ANN401 - any JSON
    """A response of compact JSON."""
    body = msgspec.json.encode(value)
    return Response(body, headers={"content-type": "application/json"})
