"""The format of a model that brings its own chat template, or several by name."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any

from localchat.chat_format.answer_parser import with_calls
from localchat.chat_format.parser import Parser, Rendered
from localchat.chat_format.reasoning_parser import Family
from localchat.chat_format.render_process import RenderProcess
from localchat.chat_format.template import ChatTemplate
from localchat.chat_format.template_messages import ToolCallConvention, to_dicts, whole_tool
from localchat.chat_format.tool_calls.families import UNSURE, style_of
from localchat.chat_format.tool_calls.family import ToolCallFamily
from localchat.engine.request import CalledTool, Message, Messages
from localchat.errors import TemplateError

_SWITCHES = ("enable_thinking", "thinking")
"""Options by which templates let thinking be turned on and off."""

NO_SWITCH = "This model's chat template has no switch for thinking: the wish was not passed on."
NO_TOOLS = "This model's chat template has no place for tools: the model was not told of them."


class TemplateFormat:
    """Renders with the template that fits: `tool_use` where tools are given, else `default`."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        process: RenderProcess,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._voices = {
            name: _TemplateProbe(ChatTemplate(source, special_tokens, process=process, now=now))
            for name, source in sources.items()
        }
        whole = "\n".join(sources.values())
        self.reasoning = Family.of(whole)
        self.markup = self.reasoning.markup
        self._whole = whole
        self._now = now
        self._reasons = any(tag in whole for tag in self.reasoning.markup)

    @cached_property
    def calls(self) -> ToolCallFamily:
        """By the template's source; where that tells too little, by a call as it renders one."""
        found = style_of(self._whole)
        if found.name in UNSURE and "tool" in self._whole:
            shown = style_of(self._voice(with_tools=True).shown)
            return found if shown.name == "unknown" else shown
        return found

    def render(self, messages: Messages) -> Rendered:
        """The prompt of a conversation; TemplateError where the template refuses it."""
        offered = () if messages.tool_choice == "none" else messages.tools
        tools = [whole_tool(tool) for tool in offered] or None
        voice = self._voice(with_tools=tools is not None)
        said = messages.messages
        if not said:
            raise TemplateError("There is no message to render.", reason="input")
        known = voice.template.variables()
        options, warnings = _options(messages, known)
        if tools and "functions" in known:
            # Firefunction's names for the tools, as text, and for the day.
            options = {
                "functions": json.dumps(tools, indent=4),
                "datetime": self._today(),
                **options,
            }
        calls = any(message.tool_calls or message.role == "tool" for message in said)
        dicts = to_dicts(said, voice.dialect if calls else None, self.calls.form)
        if messages.continue_last and said[-1].role == "assistant":
            last = said[-1]
            field = "reasoning_content" if last.reasoning and not last.content else "content"
            text = voice.template.prolong(dicts, field=field, tools=tools, options=options)
            thinks = field == "reasoning_content" or self.reasoning.left_open(
                text, len(text) - len(last.content.rstrip())
            )
        else:
            text = voice.template.render(dicts, tools=tools, options=options)
            thinks = self.reasoning.left_open(text)
        if tools and not any(_name(tool) in text for tool in tools):
            warnings = (*warnings, NO_TOOLS)
        return Rendered(
            text,
            opens_reasoning=thinks,
            may_reason=self._may_reason(text) and not messages.continue_last,
            warnings=warnings,
            tools=tuple(tools or ()),
        )

    def _may_reason(self, prompt: str) -> bool:
        """Whether an answer may begin with reasoning: the template knows it, and the prompt has not
        closed it already."""
        return self._reasons and not prompt.rstrip().endswith(self.reasoning.closes)

    def splitter(self, rendered: Rendered) -> Parser:
        """Splits reasoning from the answer, and finds the calls of tools that were offered."""
        return with_calls(
            self.reasoning, self.calls, rendered.tools, opened=rendered.opens_reasoning
        )

    def _today(self) -> str:
        return self._now().strftime("%B %d, %Y")

    def _voice(self, *, with_tools: bool) -> "_TemplateProbe":
        if with_tools and "tool_use" in self._voices:
            return self._voices["tool_use"]
        if len(self._voices) == 1:
            return next(iter(self._voices.values()))
        if "default" not in self._voices:
            raise TemplateError(
                f"The model brings {len(self._voices)} chat templates and none is the default: "
                f"{', '.join(sorted(self._voices))}.",
                reason="input",
            )
        return self._voices["default"]


class _TemplateProbe:
    """A template and what it wants of tool calls, found by trying."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template

    @cached_property
    def dialect(self) -> ToolCallConvention:
        """The first way of writing a tool call that shows its arguments, and not in Python's
        quotes."""
        for null in (False, True):
            for text in (False, True):
                dialect = ToolCallConvention(arguments_as_text=text, no_content_as_null=null)
                shown = self._shown(_probe(_SHORT_ID), dialect)
                if _KEY in shown and f"'{_KEY}'" not in shown:
                    short = _KEY not in self._shown(_probe(_LONG_ID), dialect)
                    two = self._shown(_probe(_SHORT_ID, "probe0002"), dialect)
                    cut = self._shown(_probe(_SHORT_ID, arguments=_CUT_OFF), dialect)
                    dialect = replace(dialect, short_ids=short, one_call=two.count(_KEY) < 2)
                    dialect = replace(dialect, mappings_only=_KEY not in cut)
                    return replace(dialect, text_apart=self._wants_text_apart(dialect))
        results = _RESULT in self._shown(_probe(_SHORT_ID), ToolCallConvention())
        return ToolCallConvention(calls_as_text=True, results_as_users=not results)

    def _wants_text_apart(self, dialect: ToolCallConvention) -> bool:
        """Whether what is said beside a call, or the call, is shown in messages of their own only, and the
        template bears that in the middle of a conversation."""
        after = Message("assistant", "probe"), Message("user", "probe")
        probe = (*_probe(_SHORT_ID, words=_WORDS), *after)
        beside, apart = (
            self._shown(probe, replace(dialect, text_apart=apart)) for apart in (False, True)
        )
        return not (_WORDS in beside and _KEY in beside) and _WORDS in apart and _KEY in apart

    @property
    def shown(self) -> str:
        """A call as the template writes it; empty where it writes none."""
        return self._shown(_probe(_SHORT_ID), self.dialect)

    def _shown(self, probe: tuple[Message, ...], dialect: ToolCallConvention) -> str:
        """A probe as the template writes it; empty where it refuses."""
        try:
            return self.template.render(to_dicts(probe, dialect), tools=[_PROBE_TOOL])
        except TemplateError:
            return ""


def _options(messages: Messages, known: frozenset[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's options, with the wish about thinking under the names that it knows."""
    options = dict(messages.template_options)
    if messages.thinking == "auto":
        return options, ()
    switches = [name for name in _SWITCHES if name in known and name not in options]
    if not switches and not any(name in options for name in _SWITCHES):
        return options, (NO_SWITCH,)
    return options | dict.fromkeys(switches, messages.thinking == "on"), ()


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


_KEY = "probe_argument"
_ARGUMENTS = f'{{"{_KEY}": "value"}}'
_CUT_OFF = _ARGUMENTS[:-2]
_RESULT = "probe_result"
_WORDS = "probe_words"
_SHORT_ID, _LONG_ID = "probe0001", "call_probe0001probe0001"


def _probe(*ids: str, words: str = "", arguments: str = _ARGUMENTS) -> tuple[Message, ...]:
    """A conversation with a call of each id, words beside them, and their results."""
    calls = [CalledTool("probe_tool", arguments, id=id_) for id_ in ids]
    results = [Message("tool", _RESULT, tool_call_id=id_, name="probe_tool") for id_ in ids]
    asked = Message("assistant", words, tool_calls=tuple(calls))
    return (Message("user", "probe"), asked, *results)


_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
