"""Variants of a conversation for chat templates that refuse or drop some of its messages."""

import asyncio
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from localchat.engine.attachments import append_content
from localchat.engine.interface import Engine
from localchat.engine.request import Message, Messages
from localchat.errors import NetworkError, TemplateError, UsageError
from localchat.server.chat.messages import SEPARATOR, join_messages
from localchat.server.leases import AsyncLease


async def template_variants(lease: AsyncLease, prompt: Messages) -> list[Messages]:
    """Return variants of a conversation, best first. The next one is tried if the template refuses one.

    A late system message stays only if the template renders all of them in place. Some templates render only
    the last one. Others move them to the beginning, which invalidates the prefix cache.
    """
    variants = [prompt]
    if any(message.role == "system" for message in prompt.messages[1:]):
        # Some templates drop late system messages without an error, which only a rendering shows.
        if not await asyncio.to_thread(_renders_system_in_place, lease.engine, prompt):
            variants.clear()
        variants.append(_changed(prompt, _late_system_as_user))
        variants.append(_changed(prompt, _system_first))
    # The unchanged variants come first: each change hides from the model who said what.
    for change in (_text_in_reasoning, _text_in_tool_result):
        if change(prompt.messages) != prompt.messages:
            variants += [_changed(variant, change) for variant in variants]
    if any(message.role == "system" for message in prompt.messages):
        # The last resort, for templates without a system role such as Gemma 2's.
        variants.append(replace(prompt, messages=_system_as_user(variants[-1].messages)))
    if prompt.continue_last:
        # Some templates cannot continue a message while they open a block of reasoning.
        variants += [
            replace(variant, thinking="off") for variant in variants if variant.thinking != "off"
        ]
        variants.append(replace(variants[0], continue_last=False))
    return variants


def _changed(
    prompt: Messages, change: Callable[[Sequence[Message]], tuple[Message, ...]]
) -> Messages:
    return replace(prompt, messages=change(prompt.messages))


def _renders_system_in_place(engine: Engine, prompt: Messages) -> bool:
    """Return True if the template renders each system message after the user's messages before it.

    A remote server that cannot render is trusted to do so.
    """
    try:
        rendered = engine.render(prompt)
    except TemplateError:
        return False
    except (NetworkError, UsageError):
        return True
    end = 0
    for message in prompt.messages:
        if message.role not in ("system", "user"):
            continue
        text = message.content.strip()
        start = rendered.find(text, end)
        if start >= 0:
            end = start + len(text)
        elif message.role == "system":
            return False
    return True


def _late_system_as_user(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Turn late system messages into user messages. The prefix before them stays cached."""
    return join_messages([*messages[:1], *map(_as_user, messages[1:])])


def _system_first(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join all system messages at the beginning."""
    system = [message for message in messages if message.role == "system"]
    others = [message for message in messages if message.role != "system"]
    return join_messages([*system, *others])


def _system_as_user(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Turn system messages into user messages, for templates without a system role."""
    return join_messages(list(map(_as_user, messages)))


def _as_user(message: Message) -> Message:
    if message.role == "system":
        return replace(message, role="user")
    return message


def _text_in_tool_result(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Append a user message that follows tool results to the last result.

    Some templates demand an answer in between.
    """
    result: list[Message] = []
    for message in messages:
        if result and result[-1].role == "tool" and message.role == "user" and message.content:
            result[-1] = append_content(result[-1], message, SEPARATOR)
        else:
            result.append(message)
    return tuple(result)


def _text_in_reasoning(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Append text beside a tool call to the reasoning: some templates have one place for both."""
    result: list[Message] = []
    for message in messages:
        if message.tool_calls and message.reasoning and message.content and not message.attachments:
            reasoning = f"{message.reasoning}{SEPARATOR}{message.content}"
            message = replace(message, reasoning=reasoning, content="")
        result.append(message)
    return tuple(result)
