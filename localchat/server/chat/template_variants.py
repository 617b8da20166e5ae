"""Variants of a conversation for chat templates that refuse or drop some messages."""

import asyncio
from collections.abc import Sequence

import msgspec

from localchat.engine.interface import Engine
from localchat.engine.request import Message, Messages
from localchat.errors import NetworkError, TemplateError, UsageError
from localchat.server.chat.messages import SEPARATOR, joined
from localchat.server.leases import AsyncLease


async def template_fallbacks(lease: AsyncLease, prompt: Messages) -> list[Messages]:
    """Variants of a conversation for rigid chat templates, best first.

    A late system message stays one only if the template renders all of them in place: some templates render
    the last one alone, some move them to the beginning, which invalidates the prefix cache.
    """
    replace = msgspec.structs.replace
    variants = [prompt]
    if has_late_system(prompt.messages):
        in_place = await asyncio.to_thread(_renders_system_in_place, lease.engine, prompt)
        variants = [prompt] if in_place else []
        variants.append(replace(prompt, messages=late_as_users(prompt.messages)))
        variants.append(replace(prompt, messages=hoisted(prompt.messages)))
    if with_one_voice(prompt.messages) != prompt.messages:
        variants += [replace(each, messages=with_one_voice(each.messages)) for each in variants]
    if with_results_last(prompt.messages) != prompt.messages:
        variants += [replace(each, messages=with_results_last(each.messages)) for each in variants]
    if any(message.role == "system" for message in prompt.messages):
        variants.append(replace(prompt, messages=without_system(variants[-1].messages)))
    if prompt.continue_last:
        variants += [replace(each, thinking="off") for each in variants if each.thinking != "off"]
        variants.append(replace(variants[0], continue_last=False))
    return variants


def _renders_system_in_place(engine: Engine, prompt: Messages) -> bool:
    """True if the template renders each system message after the user's messages before it.

    A remote server that does not offer rendering is trusted to.
    """
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


def has_late_system(messages: Sequence[Message]) -> bool:
    """True if a later message is a system message, which many templates refuse or omit."""
    return any(message.role == "system" for message in messages[1:])


def late_as_users(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Late system messages as user messages; the prefix before them stays cached."""
    return joined(
        [
            msgspec.structs.replace(message, role="user")
            if at and message.role == "system"
            else message
            for at, message in enumerate(messages)
        ]
    )


def hoisted(messages: Sequence[Message]) -> tuple[Message, ...]:
    """All system messages as one, at the beginning."""
    system = [message for message in messages if message.role == "system"]
    rest = [message for message in messages if message.role != "system"]
    return joined([*system, *rest])


def without_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """System messages as user messages, for templates without a system role."""
    made = [
        msgspec.structs.replace(message, role="user") if message.role == "system" else message
        for message in messages
    ]
    return joined(made)


def with_results_last(messages: Sequence[Message]) -> tuple[Message, ...]:
    """User messages right after tool results as part of the last result.

    Some templates want an answer in between.
    """
    made: list[Message] = []
    for message in messages:
        if made and made[-1].role == "tool" and message.role == "user" and message.content:
            parts = [text for text in (made[-1].content, message.content) if text]
            made[-1] = msgspec.structs.replace(made[-1], content=SEPARATOR.join(parts))
        else:
            made.append(message)
    return tuple(made)


def with_one_voice(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Text next to a tool call as part of the reasoning before it.

    Some templates have one place for both.
    """
    return tuple(
        msgspec.structs.replace(
            message, reasoning=f"{message.reasoning}{SEPARATOR}{message.content}", content=""
        )
        if message.tool_calls and message.reasoning and message.content
        else message
        for message in messages
    )
