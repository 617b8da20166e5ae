"""POST /v1/messages and /v1/messages/count_tokens. Anthropic's version and beta headers are ignored."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from localchat.engine.events import Done, Usage
from localchat.server.anthropic.protocol import CountTokensBody, MessagesBody
from localchat.server.anthropic.requests import as_chat, prompt_as_chat
from localchat.server.chat.content_blocks import (
    BlockClosed,
    BlockDelta,
    BlockEvent,
    BlockOpened,
    BlockOutcome,
    CollectedAnswer,
    ContentBlock,
    ContentBlocks,
)
from localchat.server.chat.endpoint import ConversationEndpoint
from localchat.server.chat.media import translate
from localchat.server.chat.messages import decode_arguments
from localchat.server.chat.request import conversation, engine_request
from localchat.server.errors import ApiError, anthropic_error
from localchat.server.formatters import json_response, new_id
from localchat.server.generation import REPETITION, ChoiceEnd, Generation, OutputEvent
from localchat.server.generation_response import GenerationResponse
from localchat.server.leases import AsyncLease
from localchat.server.paths import request_id
from localchat.server.request_body import read_json
from localchat.server.sse import named_event
from localchat.server.state import client_of, service_of
from localchat.server.token_counts import count_prompt_tokens, estimated_tokens

_PING: Final = named_event(b"ping", b'{"type":"ping"}')
_SIGNATURE: Final = "localchat"
"""Signature of reasoning, without which clients drop it. This server ignores it in requests."""
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
}
"""Type of a delta, and the field with its piece, by the kind of block. Arguments of a call are sent whole."""


async def messages(request: Request) -> ASGIApp:
    """Validate the request; GenerationResponse answers it."""
    config = service_of(request).config
    body = await read_json(request, MessagesBody, with_media=True)
    chat = await translate(request, lambda media: as_chat(body, media))
    prompt = engine_request(chat, config.limits, client_of(request))
    endpoint = MessagesEndpoint(chat, prompt, request_id(request.scope))
    return GenerationResponse(request, endpoint)


@dataclass(frozen=True, slots=True)
class MessagesEndpoint(ConversationEndpoint):
    """A message."""

    request_id: str
    """Reported by errors inside of a stream."""

    def formatter(self, lease: AsyncLease, generation: Generation) -> "MessagesFormatter":
        estimate = estimated_tokens(generation.spec.prompts[0][0].prompt)
        model = self.model or lease.name
        return MessagesFormatter(new_id("msg_"), model, self.request_id, estimate)


async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation."""
    limits = service_of(request).config.limits
    body = await read_json(request, CountTokensBody, with_media=True)
    chat = await translate(request, lambda media: prompt_as_chat(body, media))
    prompt = conversation(chat, limits)
    return json_response({"input_tokens": await count_prompt_tokens(request, body.model, prompt)})


class MessagesFormatter:
    """Formats the answers of the Messages API. A block is opened, filled and closed before the next one."""

    def __init__(
        self, id_: str, model: str, request_id: str, estimated_prompt_tokens: int = 0
    ) -> None:
        """`estimated_prompt_tokens` is reported until the engine has counted the prompt."""
        self._id = id_
        self._model = model
        self._request_id = request_id
        self._estimated_prompt_tokens = estimated_prompt_tokens
        self._blocks = ContentBlocks()

    def start(self, choices: int, prompt_tokens: int) -> bytes:
        # The cached tokens are unknown so far. `finish` reports them, and corrects an estimate.
        usage = self._usage(Usage(prompt_tokens, 0, 0))
        return _event("message_start", message=self._message([], None, usage))

    def event(self, event: OutputEvent) -> bytes:
        return b"".join(_block_event(change) for change in self._blocks.add(event))

    def finish(self, usage: Usage, done: Done | None) -> bytes:
        delta = _stop(self._blocks.end)
        return _event("message_delta", delta=delta, usage=self._usage(usage)) + _event(
            "message_stop"
        )

    def error(self, error: ApiError) -> bytes:
        return named_event(b"error", anthropic_error(error, self._request_id))

    def heartbeat(self) -> bytes:
        return _PING

    def response(self, answer: CollectedAnswer, usage: Usage, done: Done | None) -> bytes:
        (choice,) = answer.choices
        content = [_complete_block(block) for block in choice.blocks]
        return msgspec.json.encode(self._message(content, choice.end, self._usage(usage)))

    def _message(
        self, content: list[dict[str, Any]], end: ChoiceEnd | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **_stop(end),
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Return the usage. In this protocol, input tokens exclude cached ones."""
        prompt = usage.prompt_tokens or self._estimated_prompt_tokens
        return {
            "input_tokens": max(prompt - usage.cached_tokens, 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }


def _event(name: str, **fields: object) -> bytes:
    return named_event(name.encode(), msgspec.json.encode({"type": name, **fields}))


def _block_event(change: BlockEvent) -> bytes:
    index = change.block.index
    match change:
        case BlockOpened(block):
            return _event("content_block_start", index=index, content_block=_empty_block(block))
        case BlockDelta(block, piece):
            if not piece or block.kind == "call":
                return b""
            kind, field = _DELTAS[block.kind]
            return _delta(index, kind, field, piece)
        case BlockClosed(block):
            stop = _event("content_block_stop", index=index)
            if block.kind == "reasoning":
                return _delta(index, "signature_delta", "signature", _SIGNATURE) + stop
            if block.kind == "call":
                # Anthropic's library raises an error for arguments that are not JSON.
                arguments = msgspec.json.encode(decode_arguments(block.text)).decode()
                return _delta(index, "input_json_delta", "partial_json", arguments) + stop
            return stop
        case BlockOutcome():
            return b""  # this protocol's tools run at the client


def _delta(index: int, kind: str, field: str, piece: str) -> bytes:
    return _event("content_block_delta", index=index, delta={"type": kind, field: piece})


def _empty_block(block: ContentBlock) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}


def _complete_block(block: ContentBlock) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": _SIGNATURE}
        case "call":
            return {**_empty_block(block), "input": decode_arguments(block.text)}


def _stop(end: ChoiceEnd | None) -> dict[str, str | None]:
    reason = sequence = None
    match end:
        case ChoiceEnd(reason="stop", why=str(why)) if why != REPETITION:
            reason = "stop_sequence"
            sequence = why
        case ChoiceEnd(reason="stop"):
            reason = "end_turn"
        case ChoiceEnd(reason="tool_calls"):
            reason = "tool_use"
        case ChoiceEnd(reason="length", context_full=True):
            reason = "model_context_window_exceeded"
        case ChoiceEnd(reason="length"):
            reason = "max_tokens"
    return {"stop_reason": reason, "stop_sequence": sequence}
