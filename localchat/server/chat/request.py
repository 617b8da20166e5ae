"""Converts OpenAI request bodies to engine requests, and checks every value."""

import re
from typing import Any, Final, TypeAlias

import msgspec

from localchat.engine.request import (
    GenerateRequest,
    Messages,
    ReasoningChoice,
)
from localchat.server.chat.custom_tools import PARAMETERS, description_of
from localchat.server.chat.messages import engine_messages
from localchat.server.chat.options import Client, answer_tokens, checked_logprobs, generation
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request
from localchat.server.openai.protocol import (
    AllowedTools,
    ChatBody,
    ChatTool,
    FunctionDefinition,
    NamedToolChoice,
    TemplateBody,
    TokenizeBody,
)
from localchat.server.request_body import check_json_size

_Tools: TypeAlias = tuple[dict[str, Any], ...]
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_SWITCHES: Final = ("enable_thinking", "thinking")
_TEMPLATE_OPTIONS: Final = frozenset(
    {*_SWITCHES, "reasoning_effort", "thinking_budget", "date_string"}
)
"""Options that a request may pass to a chat template; each is a plain value."""
_TOOL_NAME: Final = re.compile(r'(?!\s)[^"\\<>\x00-\x1f\x7f]{1,256}(?<!\s)')
"""Names of tools: other characters do not survive the tool-call syntax of one model family or another."""
_NON_OBJECT_TYPES: Final = ("string", "number", "integer", "boolean", "array", "null")


def conversation(body: ChatBody | TemplateBody | TokenizeBody, limits: ServerLimits) -> Messages:
    """The conversation with its tools, as the model's template gets it. Raises ApiError."""
    messages = engine_messages(body.messages or (), limits)
    tools = _tools(body.tools, limits)
    options: dict[str, Any] = {}
    thinking: ReasoningChoice = "auto"
    budget: int | None = None
    choice = "auto"
    if not isinstance(body, TokenizeBody):
        choice, tools = _tool_choice(body.tool_choice, tools)
        options = _template_options(body.chat_template_kwargs or {})
        effort = body.reasoning_effort
        if isinstance(body, ChatBody):
            budget = _think_budget(body, options)
            effort = effort or _thinking_of_other_servers(body, options)
        thinking = _thinking(options, effort)
    last = messages[-1]
    declines = isinstance(body, ChatBody) and body.continue_final_message is False
    continues = last.role == "assistant" and not last.tool_calls and not declines
    if continues and not last.content and not last.reasoning and len(messages) > 1:
        # an empty answer cannot be continued
        messages = messages[:-1]
        continues = False
    return Messages(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not (isinstance(body, ChatBody) and body.parallel_tool_calls is False),
        template_options=options,
        thinking=thinking,
        think_budget=budget,
        continue_last=continues,
    )


def _tools(tools: list[ChatTool] | None, limits: ServerLimits) -> _Tools:
    given = tools or []
    if len(given) > limits.tools:
        raise bad_request(
            f"There are {len(given)} tools; the limit is {limits.tools}.", param="tools"
        )
    return tuple(_tool(at, tool, limits) for at, tool in enumerate(given))


def _tool(at: int, tool: ChatTool, limits: ServerLimits) -> dict[str, Any]:
    function: FunctionDefinition | None = tool.function
    which = "custom" if tool.type == "custom" else "function"
    if which == "custom" and tool.custom is not None:
        description = description_of(tool.custom.description, tool.custom.format)
        function = FunctionDefinition(tool.custom.name, description, PARAMETERS)
    elif tool.type not in ("function", "custom"):
        raise bad_request(
            f"Tools are functions; one of type {tool.type[:50]!r} cannot be called here.",
            param=f"tools[{at}]",
        )
    if function is None:
        raise bad_request(
            f"The field 'tools[{at}].{which}' is required.",
            param=f"tools[{at}].{which}",
            code="missing_required_parameter",
        )
    if not _TOOL_NAME.fullmatch(function.name):
        raise bad_request(
            f"No model can call a tool of the name {function.name[:50]!r}: it must have 1 to 256 characters, "
            "such as letters, digits, - and _, and no quote, backslash, angle bracket or line break.",
            param=f"tools[{at}].{which}.name",
        )
    parameters = function.parameters or {"type": "object", "properties": {}}
    if (kind := parameters.get("type")) in _NON_OBJECT_TYPES:
        raise bad_request(
            f"The parameters of the tool {function.name!r} have the type {kind!r}; they must be an object.",
            param=f"tools[{at}].function.parameters",
        )
    check_json_size(parameters, limits, f"tools[{at}].function.parameters")
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = parameters
    if function.strict is not None:
        described["strict"] = function.strict
    return {"type": "function", "function": described}


def _tool_choice(choice: str | NamedToolChoice | None, tools: _Tools) -> tuple[str, _Tools]:
    """The tool choice and the tools that it leaves.

    The choice is `auto`, `none`, `required` or a tool's name.
    """
    if isinstance(choice, NamedToolChoice):
        if choice.type == "function":
            name = choice.function.name if choice.function else choice.name or ""
            _check_tool(name, tools, "tool_choice.function.name")
            return name, tools
        if choice.type == "custom":
            name = choice.custom.name if choice.custom else choice.name or ""
            _check_tool(name, tools, "tool_choice.custom.name")
            return name, tools
        if choice.type == "allowed_tools" and choice.allowed_tools is not None:
            allowed = choice.allowed_tools
            tools = _allowed_tools(allowed, tools)
            return _choice_mode(
                allowed.mode or "auto", tools, "tool_choice.allowed_tools.mode"
            ), tools
        choice = choice.type
    return _choice_mode(choice or "auto", tools, "tool_choice"), tools


def _choice_mode(choice: str, tools: _Tools, param: str) -> str:
    mode = {"any": "required"}.get(choice, choice)  # as Mistral and Anthropic call it
    if mode not in ("auto", "none", "required"):
        raise bad_request(
            f"The tool choice {choice[:50]!r} is unknown; the choices are auto, none, required and "
            '{"type": "function", "function": {"name": NAME}}.',
            param=param,
        )
    if mode == "required" and not tools:
        raise bad_request("A tool call is required, but there are no tools.", param=param)
    return mode


def _allowed_tools(allowed: AllowedTools, tools: _Tools) -> _Tools:
    names = [(tool.function or tool.custom or tool).name or "" for tool in allowed.tools]
    for at, name in enumerate(names):
        _check_tool(name, tools, f"tool_choice.allowed_tools.tools[{at}]")
    return tuple(tool for tool in tools if tool["function"]["name"] in names)


def _check_tool(name: str, tools: _Tools, param: str) -> None:
    if name not in [tool["function"]["name"] for tool in tools]:
        raise bad_request(f"The tool {name[:100]!r} is not among 'tools'.", param=param)


def _template_options(given: dict[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        param = f"chat_template_kwargs.{name[:50]}"
        if name not in _TEMPLATE_OPTIONS:
            raise bad_request(
                f"The template option {name[:50]!r} is not supported; the options are: "
                f"{', '.join(sorted(_TEMPLATE_OPTIONS))}.",
                param=param,
            )
        if not isinstance(value, str | bool | int | float | None):
            raise bad_request("A template option must be a plain value.", param=param)
    return dict(given)


def _thinking_of_other_servers(body: ChatBody, options: dict[str, Any]) -> str | None:
    """Read the thinking switches of other servers' APIs.

    A switch goes to the options if they have none yet, an effort is returned; unknown shapes are ignored.
    """
    switches = [body.enable_thinking, body.thinking, body.reasoning]
    for at, value in enumerate(switches):
        if isinstance(value, dict):
            switch = {"enabled": True, "disabled": False}.get(str(value.get("type")))
            switches[at] = switch if switch is not None else value.get("enabled")
    if not any(options.get(name) is not None for name in _SWITCHES):
        found = [value for value in switches if isinstance(value, bool)]
        options |= {"enable_thinking": found[0]} if found else {}
    effort = body.reasoning.get("effort") if isinstance(body.reasoning, dict) else None
    return effort if effort in _EFFORTS else None


def _think_budget(body: ChatBody, options: dict[str, Any]) -> int | None:
    """Most tokens of reasoning, under any server's name for it. Below 0 is no limit, as there."""
    given: list[Any] = [
        body.thinking_budget,
        body.thinking_budget_tokens,
        body.thinking_token_budget,
        options.get("thinking_budget"),
        body.thinking.get("budget_tokens") if isinstance(body.thinking, dict) else None,
        body.reasoning.get("max_tokens") if isinstance(body.reasoning, dict) else None,
    ]
    budgets = [one for one in given if isinstance(one, int) and not isinstance(one, bool)]
    if not budgets or min(budgets) < 0:
        return None
    return min(min(budgets), _MAX_THINK_BUDGET)


def _thinking(options: dict[str, Any], effort: str | None) -> ReasoningChoice:
    """The thinking mode. Removes its switches from the options, because the engine knows their names.

    effort: OpenAI's `reasoning_effort`, which some templates read too.
    """
    switches = [value for name in _SWITCHES if (value := options.pop(name, None)) is not None]
    if effort:
        effort = {"max": "xhigh"}.get(effort, effort)
        if effort not in _EFFORTS:
            raise bad_request(
                f"'reasoning_effort' must be one of {', '.join(_EFFORTS)}; got {effort[:50]!r}.",
                param="reasoning_effort",
            )
        if effort != "none":
            options.setdefault("reasoning_effort", "low" if effort == "minimal" else effort)
        switches.append(effort not in ("none", "minimal"))
    if not switches:
        return "auto"
    return "on" if switches[0] else "off"


_MAX_THINK_BUDGET: Final = 1 << 31


def chat_request(body: ChatBody, limits: ServerLimits, client: Client) -> GenerateRequest:
    """The engine request of a chat. Raises ApiError."""
    top = body.top_logprobs
    if top and not body.logprobs:
        raise bad_request("The field 'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    named = {
        "max_tokens": body.max_tokens,
        "max_completion_tokens": body.max_completion_tokens,
        "n_predict": body.n_predict,
    }
    requested = {name: each for name, each in named.items() if each is not None}
    request = generation(
        body,
        conversation(body, limits),
        limits,
        client=client,
        max_tokens=answer_tokens(requested, limits, least=0 if body.n_predict == 0 else 1),
        logprobs=checked_logprobs(top or 0, "top_logprobs") if body.logprobs else None,
    )
    # A limit that the operator chose replaces the default one.
    default_limit = not requested and limits.answer_tokens == ServerLimits().answer_tokens
    return msgspec.structs.replace(request, default_limit=default_limit)


# ---------------------------------------------------------------------------- parts of a request
