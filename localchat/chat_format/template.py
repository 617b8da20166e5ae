"""Renders conversations to prompts with a model's own chat template.

The output equals transformers' `apply_chat_template`, including settings, filters, names and
`continue_final_message`. The template runs in a helper process (render_process.py).
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from localchat.chat_format.render_process import RenderFailure, RenderProcess, exceeded
from localchat.errors import TemplateError

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})

_MARKER = "LOCALCHAT_GOES_ON_HERE "
"""Appended to the text to continue, then removed with everything after it.

If the template trims, the space at its end is missing from the prompt.
"""


class ChatTemplate:
    """A jinja chat template, compiled at the first use.

    Methods that compile or render raise TemplateError with `details["reason"]`: `syntax`, `refused` (the
    template called raise_exception), `broken` (the template failed), `escape` (it accessed what the sandbox
    hides), `limit` or `input`.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        process: RenderProcess,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        """Texts by their names in templates: `bos_token`, `eos_token`, …"""
        self._process = process
        self._now = now
        """Clock of `strftime_now`."""
        self._variables: frozenset[str] | None = None
        self.parts_only = False
        """Whether the template reads a message's content as a list of parts, and not as text."""

    def variables(self) -> frozenset[str]:
        """Return the names that the template reads but does not set, such as `enable_thinking`."""
        if self._variables is None:
            try:
                self._variables = self._process.variables(self.source)
            except RenderFailure as failure:
                raise _translate(failure) from failure
        return self._variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt. `messages`, `tools` and `options` are plain data as in JSON.

        An option takes precedence over a special token of the same name.
        """
        options = dict(options or {})
        # Compile the template under a time limit of its own.
        self.variables()
        if reserved := sorted(_RESERVED & options.keys()):
            raise TemplateError(
                f"A template option may not be named {', '.join(reserved)}.", reason="input"
            )
        values = {
            "documents": None,
            **self._special_tokens,
            **options,
            "messages": [self._content(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._process.render(self.source, values, self._now())
        except RenderFailure as failure:
            raise _translate(failure) from failure

    def _content(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message whose content has the form that the template reads."""
        content = message.get("content")
        if not self.parts_only or not isinstance(content, str):
            return message
        return {**message, "content": [{"type": "text", "text": content}]}

    def continue_final(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        field: str = "content",
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt up to the end of the last message's `field`, so that the model continues it."""
        if not messages or not isinstance(text_to_continue := messages[-1].get(field), str):
            raise _cannot_continue(f"the last message has no {field}")
        copies = [name for name in _copies(field) if messages[-1].get(name) == text_to_continue]
        if not any(name in self.source for name in copies):
            raise _cannot_continue(f"its template does not read {field}")
        last = {**messages[-1], **dict.fromkeys(copies, text_to_continue + _MARKER)}
        text = self.render(
            [*messages[:-1], last], tools=tools, options=options, add_generation_prompt=False
        )
        marker = _MARKER.strip()
        if marker not in text or text_to_continue.strip() not in text:
            raise _cannot_continue("its template leaves out the end of the last message")
        end = text.rindex(marker)
        trims = not text.startswith(_MARKER, end)
        return text[:end].rstrip() if trims else text[:end]


_LIMITS = {
    "MemoryError": "takes too much memory",
    "RecursionError": "nests, or calls itself, too deep",
}


def _translate(failure: RenderFailure) -> TemplateError:
    """Return the error for the user."""
    message = failure.message
    line = failure.line
    match failure.reason:
        case "syntax":
            return TemplateError(
                f"The model's chat template cannot be read, line {line}: {message}.",
                hint="Another file of this model may have a sound template.",
                reason="syntax",
                line=line,
            )
        case "escape":
            return TemplateError(
                f"The model's chat template was stopped: {message}",
                hint="The template may be malicious. Use this file only if you trust its source.",
                reason="escape",
                line=line,
            )
        case "refused":
            return TemplateError(
                f"The model's chat template refuses this conversation: {message}",
                hint="The template restricts roles, their order or options. Change the messages accordingly.",
                reason="refused",
                line=line,
            )
        case "limit":
            return exceeded(_LIMITS.get(failure.type, message))
    where = f", line {line}" if line else ""
    cause = f"{failure.type}: {message}"[:500]
    return TemplateError(
        f"The model's chat template fails on this conversation{where}: {cause}",
        hint="The template may not support tools, or this order of roles.",
        reason="broken",
        line=line,
    )


_REASONING = ("reasoning_content", "thinking", "reasoning")


def _copies(field: str) -> tuple[str, ...]:
    """Return the names of `field` in a message. Templates read reasoning by several names."""
    return _REASONING if field in _REASONING else (field,)


def _cannot_continue(why: str) -> TemplateError:
    return TemplateError(
        f"This model cannot continue the last message: {why}.",
        hint="Send it as a new message instead.",
        reason="input",
    )
