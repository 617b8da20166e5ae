"""Bases of the endpoints that answer a conversation or continue a text."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from localchat.engine.request import GenerateRequest, Messages
from localchat.server.chat.options import GenerationFields
from localchat.server.chat.request import ChatRequest
from localchat.server.chat.template_variants import template_variants
from localchat.server.generation import GenerationSpec
from localchat.server.leases import AsyncLease


@dataclass(frozen=True, slots=True)
class ConversationEndpoint:
    """An Endpoint of a conversation. Each protocol adds its formatter."""

    chat: ChatRequest
    request: GenerateRequest
    """The conversation as a request of the engine."""

    @property
    def model(self) -> str | None:
        return self.chat.fields.model

    @property
    def streams(self) -> bool:
        return bool(self.chat.fields.stream)

    @property
    def requested_tokens(self) -> int | None:
        max_tokens = self.chat.max_tokens
        return max_tokens.get("max_completion_tokens") or max_tokens.get("max_tokens")

    async def spec(self, lease: AsyncLease) -> GenerationSpec:
        prompt = self.request.prompt
        assert isinstance(prompt, Messages)
        variants = await template_variants(lease, prompt)
        return GenerationSpec(
            [[msgspec.structs.replace(self.request, prompt=variant) for variant in variants]],
            single_call=self.chat.has_one_call,
            progress=self.streams and bool(self.chat.fields.return_progress),
        )


@dataclass(frozen=True, slots=True)
class TextEndpoint:
    """An Endpoint that continues texts. Each protocol adds its formatter."""

    body: GenerationFields
    requests: Sequence[GenerateRequest]

    @property
    def model(self) -> str | None:
        return self.body.model

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    @property
    def requested_tokens(self) -> int | None:
        return self.requests[0].max_tokens
