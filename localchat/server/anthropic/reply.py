"""An answer of the Messages API, as events of a stream or in one piece."""

from typing import Any, Final

import msgspec

from localchat.engine.events import Done, Usage
from localchat.server.answering import REPETITION, End, Told
from localchat.server.blocks import Block, Blocks, Change, Closed, Grown, Opened
from localchat.server.dialects import anthropic_error
from localchat.server.failures import ApiError
from localchat.server.sse import named

_PING: Final = named(b"ping", b'{"type":"ping"}')
_SIGNATURE: Final = "localchat"
"""Clients keep reasoning only where it is signed; nobody here checks it when it comes back."""


class MessageFrame(msgspec.Struct, frozen=True):
    """What is known of an answer before it begins. `request`: the number of the request. `guess`: tokens of the
    prompt, where nobody counts them."""

    id: str
    model: str
    request: str
    guess: int = 0

    def usage(self, told: Usage) -> dict[str, int]:
        """Here the prompt's tokens without those that came from the cache."""
        prompt = told.prompt_tokens or self.guess
        return {
            "input_tokens": max(prompt - told.cached_tokens, 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": told.cached_tokens,
            "output_tokens": told.completion_tokens,
        }

    def message(
        self, content: list[dict[str, Any]], end: End | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **_stop(end),
            "usage": usage,
        }


class MessageStream:
    """Every block is opened, filled and closed before the next."""

    def __init__(self, frame: MessageFrame) -> None:
        self._frame = frame
        self._blocks = Blocks()

    def opening(self, choices: int, prompt_tokens: int) -> bytes:
        """How much of the prompt is cached is known with the first step only; the end says it, and corrects a
        guess."""
        usage = self._frame.usage(Usage(prompt_tokens, 0, 0))
        message = self._frame.message([], None, usage)
        return _event("message_start", message=message)

    def told(self, told: Told) -> bytes:
        return b"".join(_written(change) for change in self._blocks.take(told))

    def ending(self, usage: Usage, done: Done | None) -> bytes:
        delta = _stop(self._blocks.end)
        return _event("message_delta", delta=delta, usage=self._frame.usage(usage)) + _event(
            "message_stop"
        )

    def broken(self, error: ApiError) -> bytes:
        return named(b"error", anthropic_error(error, self._frame.request))

    def alive(self) -> bytes:
        return _PING


class MessageWhole:
    """The whole answer as one message."""

    def __init__(self, frame: MessageFrame) -> None:
        self._frame = frame
        self._blocks = Blocks()

    def take(self, told: Told) -> None:
        self._blocks.take(told)

    def result(self, usage: Usage, done: Done | None) -> bytes:
        content = [_content(block) for block in self._blocks.blocks]
        return msgspec.json.encode(
            self._frame.message(content, self._blocks.end, self._frame.usage(usage))
        )


def _event(name: str, **fields: object) -> bytes:
    return named(name.encode(), msgspec.json.encode({"type": name, **fields}))


def _written(change: Change) -> bytes:
    at = change.block.index
    match change:
        case Opened(block):
            return _event("content_block_start", index=at, content_block=_empty(block))
        case Grown(block, piece):
            kind, field = _DELTAS[block.kind]
            return _delta(at, kind, field, piece) if piece else b""
        case Closed(block):
            signed = block.kind == "reasoning"
            last = _delta(at, "signature_delta", "signature", _SIGNATURE) if signed else b""
            return last + _event("content_block_stop", index=at)


_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _delta(at: int, kind: str, field: str, piece: str) -> bytes:
    return _event("content_block_delta", index=at, delta={"type": kind, field: piece})


def _empty(block: Block) -> dict[str, Any]:
    """The block as it is opened."""
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _content(block: Block) -> dict[str, Any]:
    """The whole block."""
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": _SIGNATURE}
        case "call":
            return {**_empty(block), "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as the object that they must be here; empty where the limit of tokens cut them off."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def _stop(end: End | None) -> dict[str, str | None]:
    reason = sequence = None
    match end:
        case End(reason="stop", why=str(why)) if why != REPETITION:
            reason, sequence = "stop_sequence", why
        case End(reason="stop"):
            reason = "end_turn"
        case End(reason="tool_calls"):
            reason = "tool_use"
        case End(reason="length"):
            reason = "max_tokens"
    return {"stop_reason": reason, "stop_sequence": sequence}
