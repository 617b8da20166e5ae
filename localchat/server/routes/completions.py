"""POST /v1/completions: text to go on from, or a gap to fill (`suffix`)."""

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.request import GenerateRequest, Text, TokenIds
from localchat.server.answering import Wish
from localchat.server.asking import completion_requests
from localchat.server.body import decoded, read_body
from localchat.server.engines import Lease
from localchat.server.exchange import Exchange
from localchat.server.presenter import Frame, new_id
from localchat.server.service import asker, fingerprint, service_of
from localchat.server.text_reply import TextStream, TextWhole
from localchat.server.wire import CompletionBody


async def completions(request: Request) -> ASGIApp:
    """Validated here; answered by the Exchange."""
    config = service_of(request).config
    body = decoded(await read_body(request, config.limits), CompletionBody, config.limits)
    asked = completion_requests(body, config.limits, asker(request))
    return Exchange(request, TextPlan(body, asked, config.loop_guard))


@dataclass(frozen=True, slots=True)
class TextPlan:
    """See Plan. `echoes`: the prompt of each choice, once the engine could read it."""

    body: CompletionBody
    asked: tuple[GenerateRequest, ...]
    loop_guard: bool
    echoes: list[str] = field(default_factory=list)

    @property
    def model(self) -> str | None:
        return self.body.model

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    @property
    def wanted_tokens(self) -> int | None:
        return self.body.max_tokens

    async def wish(self, lease: Lease) -> Wish:
        if self.body.echo:
            for asked in self.asked:
                text = await asyncio.to_thread(_prompt_text, lease, asked)
                self.echoes.extend([text] * asked.n)
        return Wish([[asked] for asked in self.asked], loop_guard=self.loop_guard)

    def stream(self, lease: Lease, wish: Wish) -> TextStream:
        options = self.body.stream_options
        return TextStream(
            frame=self._frame(lease),
            echoes=self.echoes,
            with_usage=bool(options and options.include_usage),
            with_timings=bool(self.body.timings),
            with_logprobs=self.body.logprobs is not None,
        )

    def whole(self, lease: Lease, wish: Wish) -> TextWhole:
        return TextWhole(
            self._frame(lease),
            wish.choices,
            echoes=self.echoes,
            with_timings=bool(self.body.timings),
            with_logprobs=self.body.logprobs is not None,
        )

    def _frame(self, lease: Lease) -> Frame:
        model = self.body.model or lease.name
        return Frame(new_id("cmpl-"), "text_completion", model, fingerprint(lease.info))


def _prompt_text(lease: Lease, asked: GenerateRequest) -> str:
    match asked.prompt:
        case Text(text):
            return text
        case TokenIds(tokens):
            return lease.engine.detokenize(tokens)
    return ""
