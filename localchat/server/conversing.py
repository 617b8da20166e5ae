"""The conversation of a chat as the engine takes it: messages, tools, and what the template is told."""

from typing import Any, Final

from localchat.engine.request import Messages, ReasoningChoice
from localchat.server.body import check_size
from localchat.server.config import Limits
from localchat.server.failures import refused
from localchat.server.messages import engine_messages
from localchat.server.wire import (
    ChatBody,
    Function,
    NamedTool,
    TemplateBody,
    TokenizeBody,
    Tool,
)

_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
_SWITCHES: Final = ("enable_thinking", "thinking")
_OPTIONS: Final = frozenset({*_SWITCHES, "reasoning_effort", "thinking_budget", "date_string"})
"""What a request may hand to a chat template: each a plain value that templates read as a switch."""


def conversation(body: ChatBody | TemplateBody | TokenizeBody, limits: Limits) -> Messages:
    """The conversation with its tools, as the model's template gets it. Raises ApiError."""
    messages = engine_messages(body.messages or (), limits)
    tools = _tools(body.tools, limits)
    options: dict[str, Any] = {}
    thinking: ReasoningChoice = "auto"
    choice = "auto"
    if not isinstance(body, TokenizeBody):
        choice = _tool_choice(body.tool_choice, tools)
        options = _template_options(body.chat_template_kwargs or {})
        thinking = _thinking(options, body.reasoning_effort)
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


def _tools(tools: list[Tool] | None, limits: Limits) -> tuple[dict[str, Any], ...]:
    given = tools or []
    if len(given) > limits.tools:
        raise refused(f"There are {len(given)} tools; {limits.tools} are taken.", param="tools")
    return tuple(_tool(at, tool, limits) for at, tool in enumerate(given))


def _tool(at: int, tool: Tool, limits: Limits) -> dict[str, Any]:
    function: Function | None = tool.function
    if tool.type != "function" or function is None:
        raise refused(
            f"Tools are functions; one of type {tool.type[:50]!r} cannot be called here.",
            param=f"tools[{at}]",
        )
    parameters = function.parameters or {"type": "object", "properties": {}}
    check_size(parameters, limits, f"tools[{at}].function.parameters")
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = parameters
    if function.strict is not None:
        described["strict"] = function.strict
    return {"type": "function", "function": described}


def _tool_choice(choice: str | NamedTool | None, tools: tuple[dict[str, Any], ...]) -> str:
    """`auto`, `none`, `required` or a tool's name."""
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name if choice.function else ""
        if name not in names:
            raise refused(
                f"The tool {name[:100]!r} is not among 'tools'.", param="tool_choice.function.name"
            )
        return name
    if choice is None or choice in ("auto", "none"):
        return choice or "auto"
    if choice != "required":
        raise refused(
            f"The tool choice {choice[:50]!r} is not known; there are auto, none, required and a "
            "function's name.",
            param="tool_choice",
        )
    if not names:
        raise refused("A tool is required and none is given.", param="tool_choice")
    return choice


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


def _thinking(options: dict[str, Any], effort: str | None) -> ReasoningChoice:
    """Whether the model is to think; its switches are taken out of the options, because the engine knows
    their names. `effort`: OpenAI's word for it, which some templates read too."""
    asked = [value for name in _SWITCHES if (value := options.pop(name, None)) is not None]
    if effort is not None:
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
