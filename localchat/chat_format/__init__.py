"""Chat formats: conversations to prompts by the model's own template, and answers back to parts.

Runs in the engine process; the templates themselves run in a helper process (render_process.py).
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
        """Syntax of the model's tool calls; its tags are markup too if tools were offered."""
        ...

    reasoning_family: ReasoningFamily
    """Tags of the model's reasoning."""

    warning: str
    """What may spoil every answer of this model; empty if nothing does."""

    def render(self, messages: Messages) -> Rendered:
        """The prompt. Raises TemplateError if the template refuses, fails, or takes too long (2 s)."""
        ...

    def answer_parser(self, rendered: Rendered) -> ChoiceParser:
        """Make a parser for one choice of the answer to `rendered`."""
        ...

    def reasoning_tracker(self, rendered: Rendered) -> ReasoningParser | ChannelParser:
        """Make the part of that parser that knows whether an answer is inside reasoning."""
        ...


def chat_format(
    templates: str | Mapping[str, str] | None,
    special_tokens: Mapping[str, str] | None = None,
    *,
    process: RenderProcess | None = None,
    now: Callable[[], datetime] = datetime.now,
    vocabulary: Callable[[], Sequence[SpecialToken]] = tuple,
) -> ChatFormat:
    """Choose the format of a model, by its own template.

    templates: the source, or several by name (`default`, `tool_use`, …); None or empty: the model
    brings none, and PlainFormat warns of that with every prompt. special_tokens: `bos_token`,
    `eos_token`, … as text. process: where the template runs; one of its own if there is none.
    vocabulary: returns the model's special tokens, which stay text where a message contains them.
    Never raises: a template that cannot be read raises when it is used.
    """
    named = {"default": templates} if isinstance(templates, str) else dict(templates or {})
    named = {name: source for name, source in named.items() if source.strip()}
    if not named:
        return PlainFormat()
    return TemplateFormat(
        named,
        special_tokens,
        process=process or RenderProcess(),
        now=now,
        vocabulary=vocabulary,
    )
