"""A request to go on with a conversation, whichever protocol it came by: what it asks of an engine."""

import asyncio
from dataclasses import dataclass

import msgspec

from localchat.engine.engine import Engine
from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import TemplateError
from localchat.server.answering import Wish
from localchat.server.engines import Lease
from localchat.server.messages import (
    has_late_system,
    hoisted,
    with_one_voice,
    without_system,
)
from localchat.server.wire import ChatBody


@dataclass(frozen=True, slots=True)
class Talk:
    """Most of a Plan: its protocol adds how the answer is written. `body`: the request as a chat."""

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
        asked = [
            msgspec.structs.replace(self.asked, prompt=way) for way in await ways(lease, prompt)
        ]
        return Wish([asked], self.body.parallel_tool_calls is False, self.loop_guard)


async def ways(lease: Lease, prompt: Messages) -> list[Messages]:
    """How to put the conversation to the model's template, best first; the others are for templates that
    refuse. A system message in the middle stays there only where the template shows all of them."""
    replace = msgspec.structs.replace
    ways = [prompt]
    system = [message.content for message in prompt.messages if message.role == "system"]
    if has_late_system(prompt.messages):
        moved = replace(prompt, messages=hoisted(prompt.messages))
        shown = await asyncio.to_thread(_shows, lease.engine, prompt, system)
        ways = [prompt, moved] if shown else [moved]
    if (one := with_one_voice(ways[-1].messages)) != ways[-1].messages:
        ways.append(replace(prompt, messages=one))
    if system:
        ways.append(replace(prompt, messages=without_system(ways[-1].messages)))
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
