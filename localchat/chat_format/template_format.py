"""Format of a model with its own chat template, or with several named ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any

from localchat.backend_api.special_tokens import SpecialToken
from localchat.chat_format.attachments import mark_attachments
from localchat.chat_format.base import ChatFormat
from localchat.chat_format.marker_guard import MarkerGuard
from localchat.chat_format.parser import Rendered
from localchat.chat_format.reasoning_parser import ReasoningFamily
from localchat.chat_format.render_process import RenderProcess
from localchat.chat_format.template import ChatTemplate
from localchat.chat_format.template_messages import ToolCallConvention, complete_tool, to_dicts
from localchat.chat_format.tool_calls.as_text import with_tools_described
from localchat.chat_format.tool_calls.families import UNSURE, family_of
from localchat.chat_format.tool_calls.family import ToolCallFamily
from localchat.engine.request import CalledTool, Message, Messages
from localchat.errors import TemplateError

_SWITCHES = ("enable_thinking", "thinking")
"""Template options that turn thinking on and off."""

_EFFORT_TOKENS = {"minimal": 1024, "low": 1024, "medium": 8192, "high": 24576}
"""Maximum reasoning tokens by effort, the same numbers as Gemini's."""

NO_THINKING_SWITCH = (
    "This model's chat template has no switch for thinking; the setting is ignored."
)
NO_TOOLS = "This model's chat template does not support tools, so the model does not see them."
TOOLS_AS_TEXT = (
    "This model's chat template does not support tools, so they are described in the instructions; the "
    "model may not have learned to call them."
)


class TemplateFormat(ChatFormat):
    """Renders with the template `default`, or with `tool_use` if tools are offered."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        process: RenderProcess,
        now: Callable[[], datetime] = datetime.now,
        vocabulary: Callable[[], Sequence[SpecialToken]] = tuple,
    ) -> None:
        """vocabulary: returns the special tokens of the model. Called at the first prompt."""
        self._vocabulary = vocabulary
        self._probes = {
            name: _TemplateProbe(ChatTemplate(source, special_tokens, process=process, now=now))
            for name, source in sources.items()
        }
        all_sources = "\n".join(sources.values())
        self.reasoning_family = ReasoningFamily.of(all_sources)
        self.markup = self.reasoning_family.markup
        self._sources = all_sources
        self._now = now
        self._reasons = any(tag in all_sources for tag in self.reasoning_family.markup)

    @cached_property
    def tool_call_family(self) -> ToolCallFamily:
        """Family of the template's source, or of a rendered call if the source is ambiguous."""
        family = family_of(self._sources)
        if family.name in UNSURE and "tool" in self._sources:
            by_call = family_of(self._probe_for(with_tools=True).rendered_call)
            return family if by_call.name == "unknown" else by_call
        return family

    @cached_property
    def _guard(self) -> MarkerGuard:
        """Guard for the special tokens of the model and the markup of the template."""
        family = self.reasoning_family
        return MarkerGuard(
            self._vocabulary(),
            source=self._sources,
            rendered="".join(probe.turns for probe in self._probes.values()),
            reasoning=(*family.opens, *family.closes),
        )

    def render(self, messages: Messages) -> Rendered:
        """Return the prompt of a conversation. Raises TemplateError."""
        marked = mark_attachments(messages)
        sealed, seal = self._guard.seal(marked.messages)
        try:
            rendered = self._render(sealed, seal)
        except TemplateError as error:
            if not seal:
                raise
            message = self._guard.clean(error.message, seal)
            raise TemplateError(message, hint=error.hint, **error.details) from error
        return marked.place(replace(rendered, tools=tuple(_offered(messages) or ())))

    def _render(self, messages: Messages, seal: str) -> Rendered:
        """Render messages with sealed markers, and return a prompt without seals."""
        tools = _offered(messages)
        probe = self._probe_for(with_tools=tools is not None)
        conversation = messages.messages
        if not conversation:
            raise TemplateError("There is no message to render.", reason="input")
        variables = probe.template.variables()
        options, warnings = _options(messages, variables)
        if "date_string" in variables:
            # Without this option, templates use a default date that is years old.
            options = {"date_string": self._now().strftime("%d %b %Y"), **options}
        convention = None
        if any(message.tool_calls or message.role == "tool" for message in conversation):
            convention = probe.convention
        if tools and not probe.shows_tools:
            conversation = with_tools_described(
                conversation, tools, self.tool_call_family.syntax, in_system=probe.shows_system
            )
        dicts = to_dicts(conversation, convention, self.tool_call_family.syntax)
        last = conversation[-1]
        if messages.continue_last and last.role == "assistant":
            field = "content"
            if last.reasoning and not last.content:
                field = "reasoning_content"
            prompt = probe.template.continue_final(dicts, field=field, tools=tools, options=options)
            text, parts = self._guard.split(prompt, seal)
            content = self._guard.clean(last.content.rstrip(), seal)
            opens_reasoning = field == "reasoning_content" or self.reasoning_family.left_open(
                text, len(text) - len(content)
            )
        else:
            prompt = probe.template.render(dicts, tools=tools, options=options)
            text, parts = self._guard.split(prompt, seal)
            opens_reasoning = self.reasoning_family.left_open(text)
        # If the history has calls, names of tools occur in a prompt without tools too.
        if tools and not any(_name(tool) in prompt for tool in tools):
            warnings = (*warnings, NO_TOOLS)
        elif tools and not probe.shows_tools:
            warnings = (*warnings, TOOLS_AS_TEXT)
        return Rendered(
            text,
            parts=parts,
            opens_reasoning=opens_reasoning,
            may_reason=self._may_reason(text) and not messages.continue_last,
            warnings=warnings,
            think_budget=_think_budget(messages, variables),
        )

    def _may_reason(self, prompt: str) -> bool:
        """Whether the template knows reasoning and the prompt does not already close it."""
        return self._reasons and not prompt.rstrip().endswith(self.reasoning_family.closes)

    def _probe_for(self, *, with_tools: bool) -> "_TemplateProbe":
        if with_tools and "tool_use" in self._probes:
            return self._probes["tool_use"]
        if len(self._probes) == 1:
            return next(iter(self._probes.values()))
        if "default" not in self._probes:
            raise TemplateError(
                f"The model has {len(self._probes)} chat templates and none is the default: "
                f"{', '.join(sorted(self._probes))}.",
                reason="input",
            )
        return self._probes["default"]


class _TemplateProbe:
    """Finds the tool call convention of a template by trial."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    @cached_property
    def convention(self) -> ToolCallConvention:
        """The first convention under which a call's arguments appear as JSON, not with Python's quotes."""
        for null in (False, True):
            for text in (False, True):
                convention = ToolCallConvention(arguments_as_text=text, no_content_as_null=null)
                rendered_call = self._render_probe(_probe(_SHORT_ID), convention)
                if _KEY in rendered_call and f"'{_KEY}'" not in rendered_call:
                    return self._completed(convention)
        shows_results = _RESULT in self._render_probe(_probe(_SHORT_ID), ToolCallConvention())
        return ToolCallConvention(calls_as_text=True, results_as_users=not shows_results)

    def _completed(self, convention: ToolCallConvention) -> ToolCallConvention:
        """Find the remaining fields of a convention under which calls appear."""
        long_id = self._render_probe(_probe(_LONG_ID), convention)
        two_calls = self._render_probe(_probe(_SHORT_ID, "probe0002"), convention)
        truncated = self._render_probe(_probe(_SHORT_ID, arguments=_TRUNCATED), convention)
        convention = replace(
            convention,
            short_ids=_KEY not in long_id,
            one_call=two_calls.count(_KEY) < 2,
            mappings_only=_KEY not in truncated,
        )
        convention = replace(convention, separate_text=self._needs_separate_text(convention))
        return replace(convention, one_text=self._needs_one_text(convention))

    def _needs_separate_text(self, convention: ToolCallConvention) -> bool:
        """Return whether the text and calls of a message appear only as two messages.

        The template must accept this in the middle of a conversation. A template that writes both at the end of
        a conversation omits the text later on purpose, as gpt-oss does with thoughts.
        """
        after = Message("assistant", "probe"), Message("user", "probe")
        probe = _probe(_SHORT_ID, words=_WORDS)
        if self._writes_both(probe, convention) or self._writes_both((*probe, *after), convention):
            return False
        return self._writes_both((*probe, *after), replace(convention, separate_text=True))

    def _writes_both(self, probe: tuple[Message, ...], convention: ToolCallConvention) -> bool:
        """Return whether both the text and the call of a probe appear."""
        rendered = self._render_probe(probe, convention)
        return _WORDS in rendered and _KEY in rendered

    def _needs_one_text(self, convention: ToolCallConvention) -> bool:
        """Return whether the template rejects a message with calls, reasoning and text."""
        if convention.separate_text:
            return False
        plain = _probe(_SHORT_ID, words=_WORDS)
        reasoned = _probe(_SHORT_ID, words=_WORDS, reasoning=_WORDS)
        accepts_text = bool(self._render_probe(plain, convention))
        return accepts_text and not self._render_probe(reasoned, convention)

    @cached_property
    def turns(self) -> str:
        """Plain conversations, rendered. A template that reads lists of parts alone gets those from then on."""
        turns = self._plain_turns()
        if _PROBE_TEXT not in turns:
            # SmolVLM's template, for example.
            self.template.parts_only = True
            turns = self._plain_turns()
            self.template.parts_only = _PROBE_TEXT in turns
        return turns

    @cached_property
    def shows_tools(self) -> bool:
        """Whether offered tools appear in a prompt."""
        user = Message("user", "probe")
        probes = (user,), (Message("system", "probe"), user)
        convention = ToolCallConvention()
        return any(_PROBE_NAME in self._render_probe(probe, convention) for probe in probes)

    @cached_property
    def shows_system(self) -> bool:
        """Whether a system message appears in a prompt."""
        system = Message("system", _WORDS)
        return _WORDS in self._render_plain((system, Message("user", _PROBE_TEXT)))

    def _plain_turns(self) -> str:
        system = Message("system", _PROBE_TEXT)
        turns = (
            Message("user", _PROBE_TEXT),
            Message("assistant", _PROBE_TEXT),
            Message("user", _PROBE_TEXT),
        )
        return self._render_plain((system, *turns)) + self._render_plain(turns)

    def _render_plain(self, messages: tuple[Message, ...]) -> str:
        """Render a probe without tools. Return an empty string if the template rejects it."""
        try:
            return self.template.render(to_dicts(messages))
        except TemplateError:
            return ""

    @property
    def rendered_call(self) -> str:
        """A rendered call, empty if the template omits calls."""
        return self._render_probe(_probe(_SHORT_ID), self.convention)

    def _render_probe(self, probe: tuple[Message, ...], convention: ToolCallConvention) -> str:
        """Render a probe. Return an empty string if the template rejects it."""
        try:
            return self.template.render(to_dicts(probe, convention), tools=[_PROBE_TOOL])
        except TemplateError:
            return ""


def _offered(messages: Messages) -> list[dict[str, Any]] | None:
    """Return the tools for the template, with all fields, or None without tools."""
    if messages.tool_choice == "none":
        return None
    return [complete_tool(tool) for tool in messages.tools] or None


def _options(
    messages: Messages, variables: frozenset[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's options, with the thinking setting under the names that it reads."""
    options = dict(messages.template_options)
    if messages.thinking == "auto":
        return options, ()
    switches = [name for name in _SWITCHES if name in variables and name not in options]
    if not switches and not any(name in options for name in _SWITCHES):
        return options, (NO_THINKING_SWITCH,)
    return options | dict.fromkeys(switches, messages.thinking == "on"), ()


def _think_budget(messages: Messages, variables: frozenset[str]) -> int | None:
    """Return the maximum number of reasoning tokens. If the template reads an effort, the model decides."""
    if messages.think_budget is not None or "reasoning_effort" in variables:
        return messages.think_budget
    return _EFFORT_TOKENS.get(str(messages.template_options.get("reasoning_effort")))


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    if isinstance(function, Mapping):
        return str(function.get("name", ""))
    return ""


_PROBE_TEXT = "probe"
_PROBE_NAME = "probe_tool"
_KEY = "probe_argument"
_ARGUMENTS = f'{{"{_KEY}": "value"}}'
_TRUNCATED = _ARGUMENTS[:-2]
_RESULT = "probe_result"
_WORDS = "probe_words"
_SHORT_ID = "probe0001"
_LONG_ID = "call_probe0001probe0001"


def _probe(
    *ids: str, words: str = "", reasoning: str = "", arguments: str = _ARGUMENTS
) -> tuple[Message, ...]:
    """Return a conversation with text, a call for each id, and their results."""
    calls = [CalledTool(_PROBE_NAME, arguments, id=id_) for id_ in ids]
    results = [Message("tool", _RESULT, tool_call_id=id_, name=_PROBE_NAME) for id_ in ids]
    calling = Message("assistant", words, reasoning=reasoning, tool_calls=tuple(calls))
    return (Message("user", "probe"), calling, *results)


_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE_NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
