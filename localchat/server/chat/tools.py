"""Tools that the model may call, and the choice among them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request, missing_field
from localchat.server.request_body import check_json_size

EngineTools: TypeAlias = tuple[dict[str, Any], ...]
"""Tools as chat templates expect them."""
_NAME: Final = re.compile(r'(?!\s)[^"\\<>\x00-\x1f\x7f]{1,256}(?<!\s)')
"""Names of tools. Other characters break the tool-call syntax of some model family."""
_NON_OBJECT_TYPES: Final = ("string", "number", "integer", "boolean", "array", "null")
_MODES: Final = ("auto", "none", "required")


class FunctionDefinition(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(msgspec.Struct, frozen=True):
    function: FunctionDefinition | None = None
    type: str = "function"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the answer may or must call."""

    mode: str = "auto"
    """`auto`, `none`, or `required`, which Mistral and Anthropic call `any`."""
    name: str | None = None
    """The tool to call. The mode does not count then."""
    allowed: Sequence[str] | None = None
    """Names of the tools that may be called. None allows all."""
    param: str = "tool_choice"
    """Field that an error names."""


def engine_tools(tools: Sequence[ChatTool], limits: ServerLimits) -> EngineTools:
    """Convert tools for the chat template. Raises ApiError."""
    if len(tools) > limits.tools:
        raise bad_request(
            f"There are {len(tools)} tools; the limit is {limits.tools}.", param="tools"
        )
    return tuple(_engine_tool(index, tool, limits) for index, tool in enumerate(tools))


def _engine_tool(index: int, tool: ChatTool, limits: ServerLimits) -> dict[str, Any]:
    function = tool.function
    if tool.type != "function":
        raise bad_request(
            f"Tools are functions; one of type {tool.type[:50]!r} cannot be called here.",
            param=f"tools[{index}]",
        )
    if function is None:
        raise missing_field(f"tools[{index}].function")
    if not _NAME.fullmatch(function.name):
        raise bad_request(
            f"No model can call a tool of the name {function.name[:50]!r}: it must have 1 to 256 characters, "
            "such as letters, digits, - and _, and no quote, backslash, angle bracket or line break.",
            param=f"tools[{index}].function.name",
        )
    parameters = function.parameters or {"type": "object", "properties": {}}
    if (type_ := parameters.get("type")) in _NON_OBJECT_TYPES:
        raise bad_request(
            f"The parameters of the tool {function.name!r} have the type {type_!r}; they must be an object.",
            param=f"tools[{index}].function.parameters",
        )
    check_json_size(parameters, limits, f"tools[{index}].function.parameters")
    description: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        description["description"] = function.description
    description["parameters"] = parameters
    if function.strict is not None:
        description["strict"] = function.strict
    return {"type": "function", "function": description}


def apply_tool_choice(choice: ToolChoice, tools: EngineTools) -> tuple[str, EngineTools]:
    """Return `auto`, `none`, `required` or a tool's name, and the tools that remain. Raises ApiError."""
    if choice.name is not None:
        _check_tool(choice.name, tools, choice.param)
        return choice.name, tools
    if choice.allowed is not None:
        for index, name in enumerate(choice.allowed):
            _check_tool(name, tools, f"tool_choice.allowed_tools.tools[{index}]")
        tools = tuple(tool for tool in tools if tool["function"]["name"] in choice.allowed)
    mode = choice.mode
    if mode == "any":
        mode = "required"
    if mode not in _MODES:
        raise bad_request(
            f"The tool choice {choice.mode[:50]!r} is unknown; the choices are auto, none, required and "
            '{"type": "function", "function": {"name": NAME}}.',
            param=choice.param,
        )
    if mode == "required" and not tools:
        raise bad_request("A tool call is required, but there are no tools.", param=choice.param)
    return mode, tools


def _check_tool(name: str, tools: EngineTools, param: str) -> None:
    if name not in [tool["function"]["name"] for tool in tools]:
        raise bad_request(f"The tool {name[:100]!r} is not among 'tools'.", param=param)
