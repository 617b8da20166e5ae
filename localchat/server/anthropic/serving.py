"""An answer of the Messages API, as events of a stream or in one piece."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from localchat.engine.events import Done, Usage
from localchat.engine.interface import Engine
from localchat.engine.request import Messages
from localchat.errors import NetworkError, TemplateError
from localchat.server.anthropic.protocol import CountTokensBody, MessagesBody
from localchat.server.anthropic.requests import as_chat, counted_chat
from localchat.server.content_blocks import (
    BlockClosed,
    BlockDelta,
    BlockEvent,
    BlockOpened,
    ContentBlock,
    ContentBlocks,
)
from localchat.server.error_formats import anthropic_error
from localchat.server.errors import ApiError
from localchat.server.formatters import new_id
from localchat.server.generation import REPETITION, ChoiceEnd, GenerationSpec, OutputEvent
from localchat.server.leases import AsyncLease
from localchat.server.middleware.access_log import request_id
from localchat.server.openai.chat import ConversationEndpoint, template_fallbacks
from localchat.server.openai.models import json
from localchat.server.openai.requests import chat_request, conversation
from localchat.server.request_body import decode, read_body
from localchat.server.sse import named
from localchat.server.state import client_of, service_of
from localchat.server.streaming import GenerationResponse

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
        self, content: list[dict[str, Any]], end: ChoiceEnd | None, usage: dict[str, int]
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
        self._blocks = ContentBlocks()

    def opening(self, choices: int, prompt_tokens: int) -> bytes:
        """How much of the prompt is cached is known with the first step only; the end says it, and corrects a
        guess."""
        usage = self._frame.usage(Usage(prompt_tokens, 0, 0))
        message = self._frame.message([], None, usage)
        return _event("message_start", message=message)

    def told(self, told: OutputEvent) -> bytes:
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
        self._blocks = ContentBlocks()

    def take(self, told: OutputEvent) -> None:
        self._blocks.take(told)

    def result(self, usage: Usage, done: Done | None) -> bytes:
        content = [_content(block) for block in self._blocks.blocks]
        return msgspec.json.encode(
            self._frame.message(content, self._blocks.end, self._frame.usage(usage))
        )


def _event(name: str, **fields: object) -> bytes:
    return named(name.encode(), msgspec.json.encode({"type": name, **fields}))


def _written(change: BlockEvent) -> bytes:
    at = change.block.index
    match change:
        case BlockOpened(block):
            return _event("content_block_start", index=at, content_block=_empty(block))
        case BlockDelta(block, piece):
            kind, field = _DELTAS[block.kind]
            return _delta(at, kind, field, piece) if piece else b""
        case BlockClosed(block):
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


def _empty(block: ContentBlock) -> dict[str, Any]:
    """The block as it is opened."""
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _content(block: ContentBlock) -> dict[str, Any]:
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


def _stop(end: ChoiceEnd | None) -> dict[str, str | None]:
    reason = sequence = None
    match end:
        case ChoiceEnd(reason="stop", why=str(why)) if why != REPETITION:
            reason, sequence = "stop_sequence", why
        case ChoiceEnd(reason="stop"):
            reason = "end_turn"
        case ChoiceEnd(reason="tool_calls"):
            reason = "tool_use"
        case ChoiceEnd(reason="length"):
            reason = "max_tokens"
    return {"stop_reason": reason, "stop_sequence": sequence}


# How long a prompt probably is, while nobody has counted it.
#
# An engine on another machine tells its count with the end of the answer, and this protocol wants one with the
# beginning. A guess that is a fifth off serves a client that watches its context; a nought does not.


_BYTES_PER_TOKEN: Final = 3.6
"""Of English 4 to 4.5, of code about 3, of text in other scripts 2 to 4."""
_FRAME_TOKENS: Final = 4
"""What a template writes around a message."""


def guessed_tokens(prompt: object) -> int:
    """Tokens of a conversation, roughly; 0 for what is none."""
    if not isinstance(prompt, Messages):
        return 0
    said = sum(
        _bytes(message.content)
        + _bytes(message.reasoning)
        + sum(_bytes(call.name) + _bytes(call.arguments) for call in message.tool_calls)
        for message in prompt.messages
    )
    said += sum(len(msgspec.json.encode(tool)) for tool in prompt.tools)
    return round(said / _BYTES_PER_TOKEN) + _FRAME_TOKENS * (len(prompt.messages) + 1)


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


# POST /v1/messages and /v1/messages/count_tokens. Headers of their protocol (versions, betas) change
# nothing.


async def messages(request: Request) -> ASGIApp:
    """Validated here; answered by the Exchange."""
    config = service_of(request).config
    sent = decode(await read_body(request, config.limits), MessagesBody, config.limits)
    chat = as_chat(sent)
    asked = chat_request(chat, config.limits, client_of(request))
    return GenerationResponse(
        request, MessagesEndpoint(chat, asked, config.loop_guard, request_id(request.scope))
    )


@dataclass(frozen=True, slots=True)
class MessagesEndpoint(ConversationEndpoint):
    """See Plan. `request`: the number of the request, which an error in the stream names."""

    request: str

    def stream(self, lease: AsyncLease, wish: GenerationSpec) -> MessageStream:
        return MessageStream(self._frame(lease, wish))

    def whole(self, lease: AsyncLease, wish: GenerationSpec) -> MessageWhole:
        return MessageWhole(self._frame(lease, wish))

    def _frame(self, lease: AsyncLease, wish: GenerationSpec) -> MessageFrame:
        guess = guessed_tokens(wish.prompts[0][0].prompt)
        return MessageFrame(new_id("msg_"), self.body.model or lease.name, self.request, guess)


async def count_tokens(request: Request) -> Response:
    """The tokens of the prompt that these messages become, by the model's own template and tokenizer. Where
    those are on another machine, and out of reach, it is a guess."""
    service = service_of(request)
    limits = service.config.limits
    sent = decode(await read_body(request, limits), CountTokensBody, limits)
    prompt = conversation(counted_chat(sent), limits)
    async with await service.lease(sent.model, request) as lease:
        try:
            tokens = await asyncio.to_thread(
                _counted, lease.engine, await template_fallbacks(lease, prompt)
            )
        except NetworkError as error:
            if error.details.get("status") not in (404, 405, 501):
                raise
            tokens = guessed_tokens(prompt)
    return json({"input_tokens": tokens})


def _counted(engine: Engine, asked: Sequence[Messages]) -> int:
    """Tokens of the first way that the template takes. Raises LocalchatError."""
    *others, last = asked
    for way in others:
        try:
            return len(engine.tokenize(engine.render(way), special=True))
        except TemplateError:
            continue
    return len(engine.tokenize(engine.render(last), special=True))
