"""POST /v1/chat/completions."""

from dataclasses import dataclass

import msgspec
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
from localchat.server.wire import ChatBody, NamedFunction, NamedTool, Tool


async def chat(request: Request) -> ASGIApp:
    """Validated here; answered by the Exchange."""
    config = service_of(request).config
    body = decoded(await read_body(request, config.limits), ChatBody, config.limits)
    as_functions = bool(body.functions and not body.tools)
    if as_functions:
        body = with_tools(body)
    asked = chat_request(body, config.limits, asker(request))
    return Exchange(request, ChatPlan(body, asked, config.loop_guard, as_functions))


def with_tools(body: ChatBody) -> ChatBody:
    """The older words for tools as the newer ones: one call at a time, and no number to it."""
    choice = body.function_call
    return msgspec.structs.replace(
        body,
        tools=[Tool(function) for function in body.functions or ()],
        tool_choice=NamedTool(choice) if isinstance(choice, NamedFunction) else choice,
        parallel_tool_calls=False,
    )


@dataclass(frozen=True, slots=True)
class ChatPlan(Talk):
    """See Plan. as_functions: a call is told in the older words too."""

    as_functions: bool = False

    def stream(self, lease: Lease, wish: Wish) -> ChatStream:
        options = self.body.stream_options
        return ChatStream(
            frame=self._frame(lease, "chat.completion.chunk"),
            with_usage=bool(options and options.include_usage),
            with_timings=bool(self.body.timings),
            with_logprobs=bool(self.body.logprobs),
            as_functions=self.as_functions,
        )

    def whole(self, lease: Lease, wish: Wish) -> ChatWhole:
        return ChatWhole(
            self._frame(lease, "chat.completion"),
            wish.choices,
            with_timings=bool(self.body.timings),
            with_logprobs=bool(self.body.logprobs),
            as_functions=self.as_functions,
        )

    def _frame(self, lease: Lease, kind: str) -> Frame:
        model = self.body.model or lease.name
        return Frame(new_id("chatcmpl-"), kind, model, fingerprint(lease.info))
