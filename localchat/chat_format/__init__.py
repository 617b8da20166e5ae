"""Chat formats: render conversations with the model's own template, and parse answers into parts.

This package runs in the engine process. Templates run in a helper process (render_process.py).
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from localchat.backend_api.special_tokens import SpecialToken
from localchat.chat_format.harmony_parser import ChannelParser
from localchat.chat_format.parser import ChoiceParser, Rendered
from localchat.chat_format.plain_format import PlainFormat
from localchat.chat_format.reasoning_parser import ReasoningFamily, ReasoningParser
from localchat.chat_format.render_process import RenderProcess
from localchat.chat_format.template_format import TemplateFormat
from localchat.chat_format.tool_calls.family import ToolCallFamily
from localchat.engine.request import Messages

__all__ = ["ChatFormat", "chat_format"]


class ChatFormat(Protocol):
    """Format of one model's conversations. Thread-safe."""

    markup: tuple[str, ...]
    """Texts whose control tokens the detokenizer must print, so that the parser sees them."""

    @property
    def tool_call_family(self) -> ToolCallFamily:
        """Syntax of the model's tool calls. If tools are offered, its tags are markup too."""
        ...

    reasoning_family: ReasoningFamily
    """Tags of the model's reasoning."""

    warning: str
    """Problem that affects every answer of this model, or an empty string."""

    def render(self, messages: Messages) -> Rendered:
        """Return the prompt. Raises TemplateError if the template refuses, fails, or takes over 2 s."""
        ...

    def answer_parser(self, rendered: Rendered) -> ChoiceParser:
        """Return a parser for one choice of the answer to `rendered`."""
        ...

    def reasoning_tracker(self, rendered: Rendered) -> ReasoningParser | ChannelParser:
        """Return a parser that only tracks whether the answer is inside reasoning."""
        ...


def chat_format(
    templates: str | Mapping[str, str] | None,
    special_tokens: Mapping[str, str] | None = None,
    *,
    process: RenderProcess | None = None,
    now: Callable[[], datetime] = datetime.now,
    vocabulary: Callable[[], Sequence[SpecialToken]] = tuple,
) -> ChatFormat:
    """Return the format of a model. Never raises: an invalid template raises when it is used.

    templates: the source, or several sources by name (`default`, `tool_use`, …). Without a template,
    PlainFormat adds a warning to every prompt. special_tokens: `bos_token`, `eos_token`, … as text. process:
    runs the template, by default in a process of its own. vocabulary: returns the model's special tokens,
    which stay plain text inside messages.
    """
    if isinstance(templates, str):
        templates = {"default": templates}
    sources = {name: source for name, source in (templates or {}).items() if source.strip()}
    if not sources:
        return PlainFormat()
    return TemplateFormat(
        sources,
        special_tokens,
        process=process or RenderProcess(),
        now=now,
        vocabulary=vocabulary,
    )
