"""POST /v1/messages and /v1/messages/count_tokens. Headers of their protocol (versions, betas) change
nothing."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from localchat.engine.interface import Engine
from localchat.engine.request import Messages
from localchat.errors import NetworkError, TemplateError
from localchat.server.answering import Wish
from localchat.server.anthropic.asking import as_chat, counted_chat
from localchat.server.anthropic.guess import guessed_tokens
from localchat.server.anthropic.reply import MessageFrame, MessageStream, MessageWhole
from localchat.server.anthropic.wire import CountBody, MessagesBody
from localchat.server.asking import chat_request
from localchat.server.body import decoded, read_body
from localchat.server.conversing import conversation
from localchat.server.engines import Lease
from localchat.server.envelope import request_id
from localchat.server.exchange import Exchange
from localchat.server.presenter import new_id
from localchat.server.routes.models import json
from localchat.server.service import asker, service_of
from localchat.server.talk import Talk, ways


async def messages(request: Request) -> ASGIApp:
    """Validated here; answered by the Exchange."""
    config = service_of(request).config
    sent = decoded(await read_body(request, config.limits), MessagesBody, config.limits)
    chat = as_chat(sent)
    asked = chat_request(chat, config.limits, asker(request))
    return Exchange(
        request, MessagesPlan(chat, asked, config.loop_guard, request_id(request.scope))
    )


@dataclass(frozen=True, slots=True)
class MessagesPlan(Talk):
    """See Plan. `request`: the number of the request, which an error in the stream names."""

    request: str

    def stream(self, lease: Lease, wish: Wish) -> MessageStream:
        return MessageStream(self._frame(lease, wish))

    def whole(self, lease: Lease, wish: Wish) -> MessageWhole:
        return MessageWhole(self._frame(lease, wish))

    def _frame(self, lease: Lease, wish: Wish) -> MessageFrame:
        guess = guessed_tokens(wish.prompts[0][0].prompt)
        return MessageFrame(new_id("msg_"), self.body.model or lease.name, self.request, guess)


async def count_tokens(request: Request) -> Response:
    """The tokens of the prompt that these messages become, by the model's own template and tokenizer. Where
    those are on another machine, and out of reach, it is a guess."""
    service = service_of(request)
    limits = service.config.limits
    sent = decoded(await read_body(request, limits), CountBody, limits)
    prompt = conversation(counted_chat(sent), limits)
    async with await service.lease(sent.model, request) as lease:
        try:
            tokens = await asyncio.to_thread(_counted, lease.engine, await ways(lease, prompt))
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
