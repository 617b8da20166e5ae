"""Routes that tokenize, detokenize and render with the model's own tokenizer and template."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localchat.engine.interface import Engine
from localchat.engine.request import Messages
from localchat.server.chat.media import translate
from localchat.server.chat.request import ChatRequest, conversation
from localchat.server.config import ServerLimits
from localchat.server.errors import ApiError, bad_request, missing_field
from localchat.server.formatters import json_response
from localchat.server.leases import AsyncLease
from localchat.server.openai.protocol import ChatBody, DetokenizeBody, TemplateBody, TokenizeBody
from localchat.server.openai.requests import as_chat, as_conversation
from localchat.server.openai_responses.mcp import check_mcp_tools, server_tools
from localchat.server.openai_responses.protocol import ResponsesBody
from localchat.server.openai_responses.requests import as_chat as responses_as_chat
from localchat.server.request_body import read_json
from localchat.server.state import service_of
from localchat.server.token_counts import count_prompt_tokens, with_template


async def tokenize(request: Request) -> Response:
    """Tokenize a text, or a conversation as the model will see it."""
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, TokenizeBody, with_media=True)
    messages = None
    if body.messages is not None:
        chat = await translate(request, lambda media: as_conversation(body, media))
        messages = conversation(chat, limits)
    if messages is None and body.content is None and body.prompt is None:
        raise missing_field("content", "One of 'content' and 'messages' is required.")
    async with await service.lease(body.model, request) as lease:
        if messages is not None:
            tokens = await with_template(lease, messages, lease.engine.prompt_tokens)
        else:
            tokens = await asyncio.to_thread(_tokens, lease, body)
        pieces = await asyncio.to_thread(_pieces, lease.engine, tokens, body, limits)
        context = lease.info.context_tokens
    reply: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": context}
    if body.with_pieces:
        reply["tokens"] = [{"id": token, "piece": pieces[token]} for token in tokens]
    if body.return_token_strs:
        reply["token_strs"] = [pieces[token] for token in tokens]
    return json_response(reply)


def _tokens(lease: AsyncLease, body: TokenizeBody) -> list[int]:
    """Tokenize a text by the rules of its field."""
    if body.content is not None:
        text = body.content
        special = bool(body.parse_special)
        add_bos = bool(body.add_special)
    else:
        text = body.prompt or ""
        special = body.parse_special is not False
        add_bos = body.add_special_tokens is not False
    tokens = lease.engine.tokenize(text, special=special)
    info = lease.info.tokenizer
    if add_bos and info is not None and info.adds_bos and info.bos_token:
        return [*lease.engine.tokenize(info.bos_token, special=True), *tokens]
    return tokens


def _pieces(
    engine: Engine, tokens: list[int], body: TokenizeBody, limits: ServerLimits
) -> dict[int, str]:
    """Return the texts of the tokens, if the client requests them. Raises ApiError."""
    if not body.with_pieces and not body.return_token_strs:
        return {}
    if len(tokens) > limits.values:
        raise bad_request(
            f"There are {len(tokens)} tokens; pieces are returned for at most {limits.values}.",
            param="with_pieces" if body.with_pieces else "return_token_strs",
        )
    return {token: engine.detokenize([token]) for token in set(tokens)}


async def tokenizer_info(request: Request) -> Response:
    """Describe special tokens and chat template, as vLLM does for programs that tokenize over HTTP."""
    service = service_of(request)
    async with await service.lease(request.query_params.get("model"), request) as lease:
        info = lease.info.tokenizer
        if info is None:
            raise ApiError(
                501, "not_supported", "The upstream server does not describe its tokenizer."
            )
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": info.bos_token or None,
                "eos_token": info.eos_token or None,
                "pad_token": info.eos_token or None,
                "add_bos_token": info.adds_bos,
                "add_eos_token": False,
                "model_max_length": lease.info.context_tokens,
                "chat_template": info.chat_template or None,
            }
        )


async def chat_input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a chat."""
    limits = service_of(request).config.limits
    body = await read_json(request, ChatBody, with_media=True)
    chat = await translate(request, lambda media: as_chat(body, media))
    return await _input_tokens(request, chat, conversation(chat, limits))


async def responses_input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a response."""
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, ResponsesBody, with_media=True)
    translated = await translate(request, lambda media: responses_as_chat(body, media))
    check_mcp_tools(translated.mcp, service.mcp.names)
    prompt = conversation(translated.chat, limits)
    if translated.mcp.tools:
        # The tools count as part of the prompt. No call runs.
        _, prompt = await server_tools(translated.mcp, service.mcp, prompt, 1, 0)
    return await _input_tokens(request, translated.chat, prompt)


async def _input_tokens(request: Request, chat: ChatRequest, prompt: Messages) -> Response:
    tokens = await count_prompt_tokens(request, chat.fields.model, prompt)
    return json_response({"object": "response.input_tokens", "input_tokens": tokens})


async def detokenize(request: Request) -> Response:
    service = service_of(request)
    body = await read_json(request, DetokenizeBody)
    if any(not 0 <= token < 1 << 31 for token in body.tokens):
        raise bad_request(
            "The field 'tokens' contains numbers that are not token ids.", param="tokens"
        )
    async with await service.lease(body.model, request) as lease:
        text = await asyncio.to_thread(lease.engine.detokenize, body.tokens)
    return json_response({"content": text, "prompt": text})


async def apply_template(request: Request) -> Response:
    """Render a conversation with the model's template."""
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, TemplateBody, with_media=True)
    chat = await translate(request, lambda media: as_conversation(body, media))
    messages = conversation(chat, limits)
    async with await service.lease(body.model, request) as lease:
        prompt = await with_template(lease, messages, lease.engine.render)
    return json_response({"prompt": prompt})
