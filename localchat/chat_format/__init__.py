"""Conversations to prompts, and answers back to parts: what a model's own chat format asks for.

Runs in the child. `chat_format` chooses; a ChatFormat renders messages and gives a parser for each
answer.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Protocol

from localchat.chat_format.parser import Parser, Rendered
from localchat.chat_format.plain_format import PlainFormat
from localchat.chat_format.reasoning_parser import ReasoningFamily
from localchat.chat_format.render_process import RenderProcess
from localchat.chat_format.template_format import TemplateFormat
from localchat.chat_format.tool_calls.family import ToolCallFamily
from localchat.engine.request import Messages

__all__ = ["ChatFormat", "chat_format"]


class ChatFormat(Protocol):
    """How one model is talked to. Callable from any thread; a render takes 2 s at most, else it
    raises."""

    markup: tuple[str, ...]
    """Texts whose control tokens the detokenizer must print, so that the parser sees them."""

    @property
    def tool_call_family(self) -> ToolCallFamily:
        """How the model writes tool calls; its tags count as markup where tools were offered."""
        ...

    reasoning_family: ReasoningFamily
    """How it marks what it thinks."""

    def render(self, messages: Messages) -> Rendered:
        """The prompt. Raises TemplateError: the template refuses, fails, or was stopped."""
        ...

    def answer_parser(self, rendered: Rendered) -> Parser:
        """A new parser for one choice of the answer to `rendered`."""
        ...


def chat_format(
    templates: str | Mapping[str, str] | None,
    special_tokens: Mapping[str, str] | None = None,
    *,
    process: RenderProcess | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> ChatFormat:
    """Choose the format of a model, by its own template.

    templates: the source, or several by name (`default`, `tool_use`, …); None or empty: the model
    brings none, and PlainFormat warns of that with every prompt. special_tokens: `bos_token`,
    `eos_token`, … as text. process: where the template runs; one of its own if there is none.
    Never raises: a template that cannot be read raises when it is used.
    """
    named = {"default": templates} if isinstance(templates, str) else dict(templates or {})
    named = {name: source for name, source in named.items() if source.strip()}
    if not named:
        return PlainFormat()
    return TemplateFormat(named, special_tokens, process=process or RenderProcess(), now=now)
