"""Base of the endpoints that answer a conversation."""

from dataclasses import dataclass

import msgspec

from localchat.engine.request import GenerateRequest, Messages
from localchat.server.chat.template_variants import template_fallbacks
from localchat.server.generation import GenerationSpec
from localchat.server.leases import AsyncLease
from localchat.server.openai.protocol import ChatBody


@dataclass(frozen=True, slots=True)
class ConversationEndpoint:
    """Base of the endpoints that answer a conversation; each adds the formatter of its protocol."""

    body: ChatBody
    """The request, translated to a chat."""
    request: GenerateRequest
    loop_guard: bool

    @property
    def model(self) -> str | None:
        return self.body.model

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    @property
    def requested_tokens(self) -> int | None:
        return self.body.max_completion_tokens or self.body.max_tokens

    async def spec(self, lease: AsyncLease) -> GenerationSpec:
        prompt = self.request.prompt
        assert isinstance(prompt, Messages)
        requests = [
            msgspec.structs.replace(self.request, prompt=fallback)
            for fallback in await template_fallbacks(lease, prompt)
        ]
        return GenerationSpec(
            [requests],
            self.body.parallel_tool_calls is False,
            self.loop_guard,
            progress=self.streams and bool(self.body.return_progress),
        )
