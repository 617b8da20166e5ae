"""Chat formats: render conversations with the model's own template, and parse answers into parts.

This package runs in the engine process. Templates run in a helper process (render_process.py).
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from localchat.backend_api.special_tokens import SpecialToken
from localchat.chat_format.base import ChatFormat
from localchat.chat_format.plain_format import PlainFormat
from localchat.chat_format.render_process import RenderProcess
from localchat.chat_format.template_format import TemplateFormat

__all__ = ["ChatFormat", "chat_format"]


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
