"""POST /v1/chat/completions."""

from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.server.answering import Wish
from localchat.server.asking import chat_request
from localchat.server.body import decoded, read_body
from localchat.server.chat_reply import ChatStream, ChatWhole
from localchat.server.engines import Lease
from localchat.server.exchange import Exchange
from localchat.server.presenter import Frame, new_id
from localchat.server.service import asker, fingerprint, service_of
from localchat.server.talk import Talk
from localchat.server.wire import ChatBody


async def chat(request: Request) -> ASGIApp:
    """Validated here; answered by the Exchange."""
    config = service_of(request).config
    body = decoded(await read_body(request, config.limits), ChatBody, config.limits)
    asked = chat_request(body, config.limits, asker(request))
    return Exchange(request, ChatPlan(body, asked, config.loop_guard))


class ChatPlan(Talk):
    """See Plan."""

    def stream(self, lease: Lease, wish: Wish) -> ChatStream:
        options = self.body.stream_options
        return ChatStream(
            frame=self._frame(lease, "chat.completion.chunk"),
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
