"""A request to go on with a conversation, whichever protocol it came by: what it asks of an engine."""

import asyncio
from dataclasses import dataclass

import msgspec

from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import NetworkError, TemplateError, UsageError
from localchat.server.answering import Wish
from localchat.server.engines import Lease
from localchat.server.messages import (
    has_late_system,
    hoisted,
    late_as_users,
    with_one_voice,
    with_results_last,
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
    refuse. A system message in the middle stays one only where the template shows all of them in their places:
    some show the last alone, some gather them at the beginning, which spoils what the cache holds."""
    replace = msgspec.structs.replace
    ways = [prompt]
    if has_late_system(prompt.messages):
        shown = await asyncio.to_thread(_shows, lease.engine, prompt)
        ways = [prompt] if shown else []
        ways.append(replace(prompt, messages=late_as_users(prompt.messages)))
        ways.append(replace(prompt, messages=hoisted(prompt.messages)))
    if with_one_voice(prompt.messages) != prompt.messages:
        ways += [replace(way, messages=with_one_voice(way.messages)) for way in ways]
    if with_results_last(prompt.messages) != prompt.messages:
        ways += [replace(way, messages=with_results_last(way.messages)) for way in ways]
    if any(message.role == "system" for message in prompt.messages):
        ways.append(replace(prompt, messages=without_system(ways[-1].messages)))
    if prompt.continue_last:
        ways += [replace(way, thinking="off") for way in ways if way.thinking != "off"]
        ways.append(replace(ways[0], continue_last=False))
    return ways


def _shows(engine: Engine, prompt: Messages) -> bool:
    """Whether the template shows each system message, behind what the user said before it. A server on another
    machine that shows nobody its prompts is trusted to."""
    try:
        rendered = engine.render(prompt)
    except TemplateError:
        return False
    except (NetworkError, UsageError):
        return True
    end = 0
    for message in prompt.messages:
        text = message.content.strip()
        at = rendered.find(text, end) if message.role in ("system", "user") else -1
        if at >= 0:
            end = at + len(text)
        elif message.role == "system":
            return False
    return True
