"""POST /v1/chat/completions."""

import asyncio
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.engine import Engine
from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import TemplateError
from localchat.server.answering import Wish
from localchat.server.asking import chat_request
from localchat.server.body import decoded, read_body
from localchat.server.chat_reply import ChatStream, ChatWhole
from localchat.server.engines import Lease
from localchat.server.exchange import Exchange
from localchat.server.messages import hoisted, late_system
from localchat.server.presenter import Frame, new_id
from localchat.server.service import asker, fingerprint, service_of
from localchat.server.wire import ChatBody


async def chat(request: Request) -> ASGIApp:
    """Validated here; answered by the Exchange."""
    config = service_of(request).config
    body = decoded(await read_body(request, config.limits), ChatBody, config.limits)
    asked = chat_request(body, config.limits, asker(request))
    return Exchange(request, ChatPlan(body, asked, config.loop_guard))


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """See Plan."""

    body: ChatBody
    asked: GenerateRequest
    loop_guard: bool

    @property
    def model(self) -> str | None:
        return self.body.model

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    @property
    def wanted_tokens(self) -> int | None:
        return self.body.max_completion_tokens or self.body.max_tokens

    async def wish(self, lease: Lease) -> Wish:
        prompt = self.asked.prompt
        assert isinstance(prompt, Messages)
        ways = [
            msgspec.structs.replace(self.asked, prompt=way) for way in await _ways(lease, prompt)
        ]
        return Wish([ways], self.body.parallel_tool_calls is False, self.loop_guard)

    def stream(self, lease: Lease, wish: Wish) -> ChatStream:
        options = self.body.stream_options
        return ChatStream(
            self._frame(lease, "chat.completion.chunk"),
            with_usage=bool(options and options.include_usage),
            with_timings=bool(self.body.timings),
            with_logprobs=bool(self.body.logprobs),
        )

    def whole(self, lease: Lease, wish: Wish) -> ChatWhole:
        return ChatWhole(
            self._frame(lease, "chat.completion"),
            wish.choices,
            with_timings=bool(self.body.timings),
            with_logprobs=bool(self.body.logprobs),
        )

    def _frame(self, lease: Lease, kind: str) -> Frame:
        model = self.body.model or lease.name
        return Frame(new_id("chatcmpl-"), kind, model, fingerprint(lease.info))


async def _ways(lease: Lease, prompt: Messages) -> list[Messages]:
    """How to put the conversation to the model's template, best first; the others are for templates that
    refuse. A system message in the middle stays there only where the template shows it."""
    replace = msgspec.structs.replace
    ways = [prompt]
    if late := late_system(prompt.messages):
        moved = replace(prompt, messages=hoisted(prompt.messages))
        shown = await asyncio.to_thread(_shows, lease.engine, prompt, [m.content for m in late])
        ways = [prompt, moved] if shown else [moved]
    if prompt.continue_last:
        ways += [replace(way, thinking="off") for way in ways if way.thinking != "off"]
        ways.append(replace(ways[0], continue_last=False))
    return ways


def _shows(engine: Engine, prompt: Messages, texts: list[str]) -> bool:
    try:
        rendered = engine.render(prompt)
    except TemplateError:
        return False
    return all(text.strip() in rendered for text in texts)
