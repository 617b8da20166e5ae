"""POST /tokenize, /detokenize, /apply-template and the counts of input tokens, by the model's own tokenizer
and template."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localchat.engine.interface import Engine
from localchat.server.errors import bad_request
from localchat.server.formatters import json_response
from localchat.server.openai.chat import with_tools
from localchat.server.openai.protocol import ChatBody, DetokenizeBody, TemplateBody, TokenizeBody
from localchat.server.openai.requests import conversation
from localchat.server.openai_responses.protocol import ResponsesBody
from localchat.server.openai_responses.requests import as_chat
from localchat.server.request_body import read_json
from localchat.server.state import service_of
from localchat.server.token_counts import count_prompt_tokens


async def tokenize(request: Request) -> Response:
    """Tokenize a text, or a conversation as the model will see it. Control tokens written in a text are plain
    text unless `parse_special` is set."""
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, TokenizeBody, limits)
    messages = conversation(body, limits) if body.messages is not None else None
    text = body.content if body.content is not None else body.prompt
    if messages is None and text is None:
        raise bad_request(
            "One of 'content' and 'messages' is required.",
            param="content",
            code="missing_required_parameter",
        )
    async with await service.lease(body.model, request) as lease:
        special = bool(body.parse_special)
        if messages is not None:
            tokens = await asyncio.to_thread(lease.engine.prompt_tokens, messages)
        else:
            tokens = await asyncio.to_thread(lease.engine.tokenize, text or "", special=special)
        listed: list[int] | list[dict[str, Any]] = tokens
        if body.with_pieces:
            if len(tokens) > limits.values:
                raise bad_request(
                    f"There are {len(tokens)} tokens; pieces are returned for at most {limits.values}.",
                    param="with_pieces",
                )
            listed = await asyncio.to_thread(_with_pieces, lease.engine, tokens)
        context = lease.info.context_tokens
    return json_response({"tokens": listed, "count": len(tokens), "max_model_len": context})


def _with_pieces(engine: Engine, tokens: list[int]) -> list[dict[str, Any]]:
    pieces = {token: engine.detokenize([token]) for token in set(tokens)}
    return [{"id": token, "piece": pieces[token]} for token in tokens]


async def chat_input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a chat."""
    limits = service_of(request).config.limits
    body = await read_json(request, ChatBody, limits)
    return await _input_tokens(request, with_tools(body) if body.functions else body)


async def responses_input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a response."""
    limits = service_of(request).config.limits
    return await _input_tokens(
        request, as_chat(await read_json(request, ResponsesBody, limits)).chat
    )


async def _input_tokens(request: Request, body: ChatBody) -> Response:
    prompt = conversation(body, service_of(request).config.limits)
    tokens = await count_prompt_tokens(request, body.model, prompt)
    return json_response({"object": "response.input_tokens", "input_tokens": tokens})


async def detokenize(request: Request) -> Response:
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, DetokenizeBody, limits)
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
    body = await read_json(request, TemplateBody, limits)
    messages = conversation(body, limits)
    async with await service.lease(body.model, request) as lease:
        return json_response({"prompt": await asyncio.to_thread(lease.engine.render, messages)})
