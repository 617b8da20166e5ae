"""Counts the prompt tokens of a conversation without answering it."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request

from localchat.engine.request import Messages
from localchat.errors import NetworkError, TemplateError
from localchat.server.chat.template_variants import template_variants
from localchat.server.leases import AsyncLease
from localchat.server.state import service_of

T = TypeVar("T")

_BYTES_PER_TOKEN: Final = 3.6
"""English text has 4 to 4.5 bytes per token, code about 3, other scripts 2 to 4."""
_ATTACHMENT_BYTES: Final = 1000
"""Text that needs as many tokens as a picture: about 280. The numbers of models differ widely."""
_MESSAGE_TOKENS: Final = 4
"""Tokens of a template's markup around a message."""


async def count_prompt_tokens(request: Request, model: str | None, prompt: Messages) -> int:
    """Count the prompt tokens of a conversation. Raises ApiError, LocalchatError.

    The count is an estimate if a remote server has the tokenizer and does not offer it.
    """
    async with await service_of(request).lease(model, request) as lease:
        try:
            return len(await with_template(lease, prompt, lease.engine.prompt_tokens))
        except NetworkError as error:
            # These statuses mean that the remote server cannot count. Others are failures.
            if error.details.get("status") not in (404, 405, 501):
                raise
            return estimated_tokens(prompt)


async def with_template(lease: AsyncLease, prompt: Messages, work: Callable[[Messages], T]) -> T:
    """Do work with the first variant of a conversation that the template accepts. Raises LocalchatError."""
    *others, last = await template_variants(lease, prompt)
    for variant in others:
        try:
            return await asyncio.to_thread(work, variant)
        except TemplateError:
            continue
    return await asyncio.to_thread(work, last)


def estimated_tokens(prompt: object) -> int:
    """Estimate the tokens of a conversation. Returns 0 for another kind of prompt.

    A remote engine reports its count at the end of the answer, but some protocols need one at the start. For a
    client that watches its context, a number that is 20 % off is better than 0.
    """
    if not isinstance(prompt, Messages):
        return 0
    size = sum(
        _bytes(message.content)
        + _bytes(message.reasoning)
        + sum(_bytes(call.name) + _bytes(call.arguments) for call in message.tool_calls)
        + len(message.attachments) * _ATTACHMENT_BYTES
        for message in prompt.messages
    )
    size += sum(len(msgspec.json.encode(tool)) for tool in prompt.tools)
    return round(size / _BYTES_PER_TOKEN) + _MESSAGE_TOKENS * (len(prompt.messages) + 1)


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))
