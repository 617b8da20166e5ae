"""POST /api/chat, /api/generate and /api/embed: answer in Ollama's format.

A stream has one JSON object per line. The last one has `done` and all metrics. A tool call is one object, sent
once its arguments are complete.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from localchat.engine.events import Done, TokenLogprob, Usage
from localchat.engine.request import GenerateRequest, Messages
from localchat.server.chat.content_blocks import (
    BlockClosed,
    BlockDelta,
    BlockEvent,
    CollectedAnswer,
    ContentBlock,
    ContentBlocks,
)
from localchat.server.chat.endpoint import ConversationEndpoint
from localchat.server.chat.logprobs import chat_logprobs
from localchat.server.chat.media import translate
from localchat.server.chat.messages import decode_arguments
from localchat.server.chat.request import ChatRequest, engine_request
from localchat.server.embeddings import checked_texts, embed
from localchat.server.errors import ApiError, missing_field
from localchat.server.formatters import json_response, utc_time
from localchat.server.generation import ChoiceEnd, Generation, GenerationSpec, OutputEvent
from localchat.server.generation_response import GenerationResponse
from localchat.server.leases import AsyncLease
from localchat.server.ollama.endpoints import server_name
from localchat.server.ollama.protocol import (
    AnswerBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaOptions,
)
from localchat.server.ollama.requests import (
    as_chat,
    as_generation,
    context_headers,
    keep_alive_s,
)
from localchat.server.request_body import read_json
from localchat.server.sse import NDJSON
from localchat.server.state import Service, client_of, service_of

Json: TypeAlias = dict[str, Any]


async def chat(request: Request) -> ASGIApp:
    """Answer a conversation. Without messages, only load the model."""
    service = service_of(request)
    config = service.config
    body = await read_json(request, OllamaChatBody, with_media=True)
    if not body.messages:
        return await _load(request, service, body, _in_message)
    chat = await translate(request, lambda media: as_chat(body, media))
    prompt = engine_request(chat, config.limits, client_of(request))
    endpoint = _endpoint(service, body, chat, prompt, _in_message)
    return GenerationResponse(request, endpoint, NDJSON)


async def generate(request: Request) -> ASGIApp:
    """Answer a prompt, continue a text (`raw`) or fill a gap (`suffix`). Without any, only load the model."""
    service = service_of(request)
    config = service.config
    body = await read_json(request, OllamaGenerateBody, with_media=True)
    if not body.prompt and not body.suffix and not body.images:
        return await _load(request, service, body, _in_response)
    client = client_of(request)
    chat, prompt = await translate(
        request, lambda media: as_generation(body, config.limits, client, media)
    )
    endpoint = _endpoint(service, body, chat, prompt, _in_response)
    return GenerationResponse(request, endpoint, NDJSON)


async def embeddings(request: Request) -> Response:
    """Embed texts, or one text at the older route /api/embeddings."""
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, OllamaEmbedBody)
    source = body.prompt if body.input is None else body.input
    if source is None:
        raise missing_field("input")
    began_s = time.perf_counter()
    load_s = 0.0
    keep_s = keep_alive_s(body.keep_alive)
    # The older route rejects a text that is too long.
    truncate = body.input is not None and body.truncate is not False
    vectors: list[list[float]] = []
    tokens = 0
    if source:
        # Ollama embeds an empty text too, and takes 0 dimensions for all of them.
        texts = checked_texts(source, limits)
        dimensions = body.dimensions or None
        async with await service.lease(server_name(service, body.model), request) as lease:
            load_s = time.perf_counter() - began_s
            if keep_s is not None:
                lease.keep_alive(keep_s)
            vectors, tokens = await asyncio.to_thread(
                embed, lease.engine, texts, dimensions, truncate=truncate
            )
    if body.input is None:
        return json_response({"embedding": vectors[0] if vectors else []})
    return json_response(
        {
            "model": body.model,
            "embeddings": vectors,
            "total_duration": _nanoseconds(time.perf_counter() - began_s),
            "load_duration": _nanoseconds(load_s),
            "prompt_eval_count": tokens,
        }
    )


async def _load(
    request: Request,
    service: Service,
    body: AnswerBody,
    piece: "PieceFormat",
) -> Response:
    """Load a model without an answer, as programs request at their start. A keep-alive of 0 unloads it."""
    name = server_name(service, body.model)
    keep_s = keep_alive_s(body.keep_alive)
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if keep_s != 0 or name in [loaded for loaded, _ in service.engines.loaded()]:
        async with await service.lease(name, request) as lease:
            headers = context_headers(body.options, lease.info.context_tokens)
            if keep_s is not None:
                lease.keep_alive(keep_s)
    response = json_response(
        {
            "model": body.model,
            "created_at": utc_time(time.time()),
            **piece(AnswerPiece()),
            "done": True,
            "done_reason": "unload" if keep_s == 0 else "load",
        }
    )
    response.raw_headers.extend(headers)
    return response


@dataclass(frozen=True, slots=True)
class OllamaEndpoint(ConversationEndpoint):
    """A chat or a prompt."""

    name: str
    """Name of the model."""
    piece: "PieceFormat"
    options: OllamaOptions | None = None
    keep_alive_s: float | None = None

    @property
    def model(self) -> str | None:
        return self.name

    async def spec(self, lease: AsyncLease) -> GenerationSpec:
        spec = GenerationSpec([[self.request]])
        if isinstance(self.request.prompt, Messages):
            spec = await ConversationEndpoint.spec(self, lease)
        headers = context_headers(self.options, lease.info.context_tokens)
        return replace(spec, keep_alive_s=self.keep_alive_s, headers=headers)

    def formatter(self, lease: AsyncLease, generation: Generation) -> "OllamaFormatter":
        model = self.chat.fields.model or lease.name
        return OllamaFormatter(model, self.piece, self.chat.logprobs)


def _endpoint(
    service: Service,
    body: AnswerBody,
    chat: ChatRequest,
    prompt: GenerateRequest,
    piece: "PieceFormat",
) -> OllamaEndpoint:
    return OllamaEndpoint(
        chat,
        prompt,
        server_name(service, body.model),
        piece,
        body.options,
        keep_alive_s(body.keep_alive),
    )


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer, or the whole answer."""

    text: str = ""
    thinking: str = ""
    calls: tuple[ContentBlock, ...] = ()


PieceFormat: TypeAlias = Callable[[AnswerPiece], Json]
"""Writes a piece of the answer in the format of its route."""


def _in_message(piece: AnswerPiece) -> Json:
    message: Json = {"role": "assistant", "content": piece.text}
    if piece.thinking:
        message["thinking"] = piece.thinking
    if piece.calls:
        message["tool_calls"] = [_call(block) for block in piece.calls]
    return {"message": message}


def _in_response(piece: AnswerPiece) -> Json:
    response = {"response": piece.text}
    if piece.thinking:
        response["thinking"] = piece.thinking
    return response


class OllamaFormatter:
    """Formats answers of Ollama's API, as lines of JSON or as one object."""

    def __init__(self, model: str, piece: PieceFormat, with_logprobs: bool) -> None:
        self._model = model
        self._piece = piece
        self._with_logprobs = with_logprobs
        self._blocks = ContentBlocks()

    def start(self, choices: int, prompt_tokens: int) -> bytes:
        return b""

    def event(self, event: OutputEvent) -> bytes:
        return b"".join(self._change(change) for change in self._blocks.add(event))

    def finish(self, usage: Usage, done: Done | None) -> bytes:
        return _line(self._whole(AnswerPiece(), self._blocks.end, usage, done))

    def error(self, error: ApiError) -> bytes:
        return _line({"error": error.message})

    def heartbeat(self) -> bytes:
        return b""

    def response(self, answer: CollectedAnswer, usage: Usage, done: Done | None) -> bytes:
        (choice,) = answer.choices
        piece = AnswerPiece(choice.text, choice.reasoning, tuple(choice.calls))
        logprobs = self._logprobs(choice.logprobs)
        return msgspec.json.encode(self._whole(piece, choice.end, usage, done) | logprobs)

    def _change(self, change: BlockEvent) -> bytes:
        match change:
            case BlockDelta(block, text, logprobs) if block.kind == "text" and (text or logprobs):
                return self._part(AnswerPiece(text=text), logprobs)
            case BlockDelta(block, text) if block.kind == "reasoning" and text:
                return self._part(AnswerPiece(thinking=text))
            case BlockClosed(block) if block.kind == "call":
                return self._part(AnswerPiece(calls=(block,)))
        return b""

    def _part(self, piece: AnswerPiece, logprobs: tuple[TokenLogprob, ...] = ()) -> bytes:
        return _line(
            {
                "model": self._model,
                "created_at": utc_time(time.time()),
                **self._piece(piece),
                "done": False,
                **self._logprobs(logprobs),
            }
        )

    def _logprobs(self, logprobs: tuple[TokenLogprob, ...]) -> Json:
        if self._with_logprobs and logprobs:
            return {"logprobs": chat_logprobs(logprobs)}
        return {}

    def _whole(
        self, piece: AnswerPiece, end: ChoiceEnd | None, usage: Usage, done: Done | None
    ) -> Json:
        return {
            "model": self._model,
            "created_at": utc_time(time.time()),
            **self._piece(piece),
            "done": True,
            "done_reason": "length" if end and end.reason == "length" else "stop",
            **_metrics(usage, done),
        }


def _metrics(usage: Usage, done: Done | None) -> dict[str, int]:
    """Return token counts, and times in nanoseconds. A time that was not measured is 0."""
    metrics = {
        "total_duration": 0,
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": 0,
        "eval_count": usage.completion_tokens,
        "eval_duration": 0,
    }
    if done is not None:
        timings = done.timings
        computed = usage.prompt_tokens - usage.cached_tokens
        left_s = max(0.0, timings.total_s - timings.queue_s)
        prompt_s = min(left_s, computed / (timings.prefill_tokens_per_s or math.inf))
        # The rate leaves out the first token, so a short answer would take longer than its request.
        eval_s = left_s - prompt_s
        if timings.decode_tokens_per_s:
            eval_s = min(eval_s, usage.completion_tokens / timings.decode_tokens_per_s)
        metrics |= {
            "total_duration": _nanoseconds(timings.load_s + timings.total_s),
            "load_duration": _nanoseconds(timings.load_s),
            "prompt_eval_duration": _nanoseconds(prompt_s),
            "eval_duration": _nanoseconds(eval_s),
        }
    return metrics


def _call(block: ContentBlock) -> Json:
    index = block.call
    function = {"index": index, "name": block.name, "arguments": decode_arguments(block.text)}
    # Ollama has the index in the function. LiteLLM looks beside it and joins calls without one.
    return {"id": block.id, "index": index, "function": function}


def _line(value: Json) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
