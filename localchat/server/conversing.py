"""The conversation of a chat as the engine takes it: messages, tools, and what the template is told."""

import re
from typing import Any, Final, TypeAlias

from localchat.engine.request import Messages, ReasoningChoice
from localchat.server.body import check_size
from localchat.server.config import Limits
from localchat.server.failures import refused
from localchat.server.messages import engine_messages
from localchat.server.wire import (
    AllowedTools,
    ChatBody,
    Function,
    NamedTool,
    TemplateBody,
    TokenizeBody,
    Tool,
)

_Tools: TypeAlias = tuple[dict[str, Any], ...]
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_SWITCHES: Final = ("enable_thinking", "thinking")
_OPTIONS: Final = frozenset({*_SWITCHES, "reasoning_effort", "thinking_budget", "date_string"})
"""What a request may hand to a chat template: each a plain value that templates read as a switch."""
_NAME: Final = re.compile(r'(?!\s)[^"\\<>\x00-\x1f\x7f]{1,256}(?<!\s)')
"""Names of tools: with another sign, the form of one family or another would give back a different name."""
_NO_OBJECTS: Final = ("string", "number", "integer", "boolean", "array", "null")


def conversation(body: ChatBody | TemplateBody | TokenizeBody, limits: Limits) -> Messages:
    """The conversation with its tools, as the model's template gets it. Raises ApiError."""
    messages = engine_messages(body.messages or (), limits)
    tools = _tools(body.tools, limits)
    options: dict[str, Any] = {}
    thinking: ReasoningChoice = "auto"
    choice = "auto"
    if not isinstance(body, TokenizeBody):
        choice, tools = _tool_choice(body.tool_choice, tools)
        options = _template_options(body.chat_template_kwargs or {})
        effort = body.reasoning_effort
        if isinstance(body, ChatBody):
            effort = effort or _others_wish(body, options)
        thinking = _thinking(options, effort)
    last = messages[-1]
    prolongs = last.role == "assistant" and not last.tool_calls
    if prolongs and not last.content and not last.reasoning and len(messages) > 1:
        messages, prolongs = messages[:-1], False  # an empty answer to go on from is none
    return Messages(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=not (isinstance(body, ChatBody) and body.parallel_tool_calls is False),
        template_options=options,
        thinking=thinking,
        continue_last=prolongs,
    )


def _tools(tools: list[Tool] | None, limits: Limits) -> _Tools:
    given = tools or []
    if len(given) > limits.tools:
        raise refused(f"There are {len(given)} tools; {limits.tools} are taken.", param="tools")
    return tuple(_tool(at, tool, limits) for at, tool in enumerate(given))


def _tool(at: int, tool: Tool, limits: Limits) -> dict[str, Any]:
    function: Function | None = tool.function
    if tool.type != "function":
        raise refused(
            f"Tools are functions; one of type {tool.type[:50]!r} cannot be called here.",
            param=f"tools[{at}]",
        )
    if function is None:
        raise refused(
            f"The field 'tools[{at}].function' is required.",
            param=f"tools[{at}].function",
            code="missing_required_parameter",
        )
    if not _NAME.fullmatch(function.name):
        raise refused(
            f"No model can call a tool of the name {function.name[:50]!r}: it must have 1 to 256 characters, "
            "such as letters, digits, - and _, and no quote, backslash, angle bracket or line break.",
            param=f"tools[{at}].function.name",
        )
    parameters = function.parameters or {"type": "object", "properties": {}}
    if (kind := parameters.get("type")) in _NO_OBJECTS:
        raise refused(
            f"The parameters of the tool {function.name!r} have the type {kind!r}; they must be an object.",
            param=f"tools[{at}].function.parameters",
        )
    check_size(parameters, limits, f"tools[{at}].function.parameters")
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = parameters
    if function.strict is not None:
        described["strict"] = function.strict
    return {"type": "function", "function": described}


def _tool_choice(choice: str | NamedTool | None, tools: _Tools) -> tuple[str, _Tools]:
    """`auto`, `none`, `required` or a tool's name; and the tools that it leaves."""
    if isinstance(choice, NamedTool):
        if choice.type == "function":
            name = choice.function.name if choice.function else choice.name or ""
            _among(name, tools, "tool_choice.function.name")
            return name, tools
        if choice.type == "allowed_tools" and choice.allowed_tools is not None:
            allowed = choice.allowed_tools
            tools = _allowed(allowed, tools)
            return _word(allowed.mode or "auto", tools, "tool_choice.allowed_tools.mode"), tools
        choice = choice.type
    return _word(choice or "auto", tools, "tool_choice"), tools


def _word(choice: str, tools: _Tools, param: str) -> str:
    word = {"any": "required"}.get(choice, choice)  # as Mistral and Anthropic call it
    if word not in ("auto", "none", "required"):
        raise refused(
            f"The tool choice {choice[:50]!r} is not known; there are auto, none, required and "
            '{"type": "function", "function": {"name": NAME}}.',
            param=param,
        )
    if word == "required" and not tools:
        raise refused("A tool is required and none is given.", param=param)
    return word


def _allowed(allowed: AllowedTools, tools: _Tools) -> _Tools:
    names = [tool.function.name if tool.function else tool.name or "" for tool in allowed.tools]
    for at, name in enumerate(names):
        _among(name, tools, f"tool_choice.allowed_tools.tools[{at}]")
    return tuple(tool for tool in tools if tool["function"]["name"] in names)


def _among(name: str, tools: _Tools, param: str) -> None:
    if name not in [tool["function"]["name"] for tool in tools]:
        raise refused(f"The tool {name[:100]!r} is not among 'tools'.", param=param)


def _template_options(given: dict[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        param = f"chat_template_kwargs.{name[:50]}"
        if name not in _OPTIONS:
            raise refused(
                f"The template option {name[:50]!r} is not taken; these are: "
                f"{', '.join(sorted(_OPTIONS))}.",
                param=param,
            )
        if not isinstance(value, str | bool | int | float | None):
            raise refused("A template option is a plain value.", param=param)
    return dict(given)


def _others_wish(body: ChatBody, options: dict[str, Any]) -> str | None:
    """What other servers' fields say of thinking: a switch goes to the options, where there is none yet, and an
    effort is returned. What is of no known shape says nothing."""
    switches = [body.enable_thinking, body.thinking, body.reasoning]
    for at, value in enumerate(switches):
        if isinstance(value, dict):
            word = {"enabled": True, "disabled": False}.get(str(value.get("type")))
            switches[at] = word if word is not None else value.get("enabled")
    if not any(options.get(name) is not None for name in _SWITCHES):
        found = [value for value in switches if isinstance(value, bool)]
        options |= {"enable_thinking": found[0]} if found else {}
    effort = body.reasoning.get("effort") if isinstance(body.reasoning, dict) else None
    return effort if effort in _EFFORTS else None


def _thinking(options: dict[str, Any], effort: str | None) -> ReasoningChoice:
    """Whether the model is to think; its switches are taken out of the options, because the engine knows
    their names. `effort`: OpenAI's word for it, which some templates read too."""
    asked = [value for name in _SWITCHES if (value := options.pop(name, None)) is not None]
    if effort:
        effort = {"max": "xhigh"}.get(effort, effort)
        if effort not in _EFFORTS:
            raise refused(
                f"The field 'reasoning_effort' is {effort[:50]!r}; there are {', '.join(_EFFORTS)}.",
                param="reasoning_effort",
            )
        if effort != "none":
            options.setdefault("reasoning_effort", "low" if effort == "minimal" else effort)
        asked.append(effort not in ("none", "minimal"))
    if not asked:
        return "auto"
    return "on" if asked[0] else "off"
