"""ChatRequest: a conversation to answer, in the one form that every protocol is translated to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from localchat.engine.request import (
    GenerateRequest,
    Infill,
    Message,
    Messages,
    ReasoningChoice,
    TextPrompt,
)
from localchat.server.chat.messages import normalize_messages
from localchat.server.chat.options import (
    CHAT_PRIORITY,
    INFILL_PRIORITY,
    Client,
    GenerationFields,
    answer_tokens,
    checked_logprobs,
    generate_request,
)
from localchat.server.chat.tools import ChatTool, ToolChoice, apply_tool_choice, engine_tools
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
_TEMPLATE_OPTIONS: Final = frozenset(
    {*THINKING_SWITCHES, "reasoning_effort", "thinking_budget", "date_string"}
)
"""Options that a request may pass to a chat template; each is a plain value."""
_MAX_THINK_BUDGET: Final = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to answer."""

    fields: GenerationFields = field(default_factory=GenerationFields)
    messages: Sequence[Message] = ()
    tools: Sequence[ChatTool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    single_call: bool = False
    """End the answer after its first tool call."""
    bind_arguments: bool = False
    """See Messages."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    """OpenAI's name of an effort."""
    think_budgets: Sequence[object] = ()
    """Limits of the reasoning in tokens. The smallest integer counts, and one below 0 lifts the limit."""
    max_tokens: Mapping[str, int | None] = field(default_factory=dict)
    """Requested length of the answer by field name."""
    min_answer_tokens: int = 1
    """Smallest length that the client may request. 0 allows a request that only fills the cache."""
    logprobs: bool = False
    """Report the log probability of each token."""
    top_logprobs: int | None = None
    """Alternatives to report for each token."""
    continue_last: bool = True
    """Continue the last message if it is the assistant's."""
    format_field: str = "response_format"
    """The protocol's field for the format of the answer, for errors."""

    @property
    def has_one_call(self) -> bool:
        """Whether the answer may have one call only. A tool that the client names is called exactly once."""
        return self.single_call or self.tool_choice.name is not None


def engine_request(
    chat: ChatRequest,
    limits: ServerLimits,
    client: Client,
    prompt: Infill | TextPrompt | None = None,
) -> GenerateRequest:
    """Return the engine's request, with every value checked. Raises ApiError.

    prompt: text that replaces the conversation.
    """
    if chat.top_logprobs and not chat.logprobs:
        raise bad_request("The field 'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    logprobs = None
    if chat.logprobs:
        logprobs = checked_logprobs(chat.top_logprobs or 0, "top_logprobs")
    request = generate_request(
        chat.fields,
        prompt or conversation(chat, limits),
        limits,
        client=client,
        max_tokens=answer_tokens(chat.max_tokens, limits, minimum=chat.min_answer_tokens),
        logprobs=logprobs,
        priority=INFILL_PRIORITY if isinstance(prompt, Infill) else CHAT_PRIORITY,
        format_field=chat.format_field,
    )
    if prompt is not None:
        return request
    # A limit that the operator chose replaces the default one.
    unlimited = all(tokens is None for tokens in chat.max_tokens.values())
    default_limit = unlimited and limits.answer_tokens == ServerLimits().answer_tokens
    return msgspec.structs.replace(request, default_limit=default_limit)


def conversation(chat: ChatRequest, limits: ServerLimits) -> Messages:
    """Return the conversation with its tools, as the chat template gets it. Raises ApiError."""
    messages = normalize_messages(chat.messages, limits)
    tools = engine_tools(chat.tools, limits)
    choice, tools = apply_tool_choice(chat.tool_choice, tools)
    options = _checked_template_options(chat.template_options)
    budget = _think_budget([*chat.think_budgets, options.get("thinking_budget")])
    thinking = _take_thinking(options, chat.reasoning_effort)
    # As in other servers, a last message of the assistant is the beginning of the answer.
    last = messages[-1]
    continues = chat.continue_last and last.role == "assistant" and not last.tool_calls
    if continues and not last.content and not last.reasoning and len(messages) > 1:
        # An empty answer cannot be continued.
        messages = messages[:-1]
        continues = False
    return Messages(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not chat.has_one_call,
        bind_arguments=chat.bind_arguments,
        template_options=options,
        thinking=thinking,
        think_budget=budget,
        continue_last=continues,
    )


def _checked_template_options(options: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        param = f"chat_template_kwargs.{name[:50]}"
        if name not in _TEMPLATE_OPTIONS:
            raise bad_request(
                f"The template option {name[:50]!r} is not supported; the options are: "
                f"{', '.join(sorted(_TEMPLATE_OPTIONS))}.",
                param=param,
            )
        if not isinstance(value, str | bool | int | float | None):
            raise bad_request("A template option must be a plain value.", param=param)
    return dict(options)


def _think_budget(budgets: Sequence[object]) -> int | None:
    """Return the smallest budget in tokens. None means no limit."""
    integers = [
        budget for budget in budgets if isinstance(budget, int) and not isinstance(budget, bool)
    ]
    if not integers or min(integers) < 0:
        return None
    return min(*integers, _MAX_THINK_BUDGET)


def _take_thinking(options: dict[str, Any], effort: str | None) -> ReasoningChoice:
    """Return the thinking mode, and remove its switches from the options: the engine sets them itself."""
    switches = [
        value for name in THINKING_SWITCHES if (value := options.pop(name, None)) is not None
    ]
    if effort:
        if effort == "max":
            effort = "xhigh"
        if effort not in EFFORTS:
            raise bad_request(
                f"'reasoning_effort' must be one of {', '.join(EFFORTS)}; got {effort[:50]!r}.",
                param="reasoning_effort",
            )
        if effort != "none":
            # Some templates read the effort too.
            options.setdefault("reasoning_effort", "low" if effort == "minimal" else effort)
        switches.append(effort not in ("none", "minimal"))
    if not switches:
        return "auto"
    return "on" if switches[0] else "off"
