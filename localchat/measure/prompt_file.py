"""Reads prompts of the user for a benchmark: one conversation a line, as JSON."""

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from localchat.errors import UsageError, reason
from localchat.measure.workload import Message, Shape

_ANSWER_TOKENS: Final = 200
_Text = Annotated[str, Meta(min_length=1)]


class _PromptMessage(msgspec.Struct, frozen=True):
    role: _Text
    content: _Text


class _PromptBody(msgspec.Struct, frozen=True):
    messages: Annotated[list[_PromptMessage], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


class _PromptLine(msgspec.Struct, frozen=True):
    """A line: `prompt`, `messages`, or `body` as in the input of `localchat batch`."""

    prompt: _Text | None = None
    messages: Annotated[list[_PromptMessage], Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    body: _PromptBody | None = None


def prompt_shape(path: Path) -> Shape:
    """Read a file as a shape whose requests are its lines. Raises UsageError naming file and line."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"--prompts {path} cannot be read: {reason(problem)}") from problem
    prompts: list[tuple[Message, ...]] = []
    longest = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            messages, max_tokens = _parse(path, number, line)
            prompts.append(messages)
            longest = max(longest, max_tokens)
    if not prompts:
        raise UsageError(f"--prompts {path} has no prompts")
    # The server counts the tokens of the prompts; four characters make about one.
    characters = sum(len(message["content"]) for prompt in prompts for message in prompt)
    prompt_tokens = max(round(characters / len(prompts) / 4), 1)
    return Shape(
        path.name, prompt_tokens, longest or _ANSWER_TOKENS, "file", prompts=tuple(prompts)
    )


def _parse(path: Path, number: int, line: str) -> tuple[tuple[Message, ...], int]:
    """The messages of a line, and its limit of tokens; 0 without one."""
    try:
        parsed = msgspec.json.decode(line, type=_PromptLine)
    except msgspec.DecodeError as problem:
        raise UsageError(f"--prompts {path}: line {number} cannot be used: {problem}") from problem
    if parsed.prompt is not None:
        return ({"role": "user", "content": parsed.prompt},), parsed.max_tokens or 0
    source = parsed.body or parsed
    if not source.messages:
        raise UsageError(
            f"--prompts {path}: line {number} has no prompt",
            hint='a line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
        )
    messages = tuple(
        {"role": message.role, "content": message.content} for message in source.messages
    )
    return messages, source.max_tokens or 0
